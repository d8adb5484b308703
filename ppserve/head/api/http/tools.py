"""Tools in the words of OpenAI's chats: what a body asks for, and an answer's parts as fields of its message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ppserve.errors import Violation
from ppserve.head.api.answer_parts.parts import AnswerText, CallArguments, CallBegin, Part, Reasoning
from ppserve.head.api.answer_parts.tools import Tool, ToolChoice, Tooling
from ppserve.head.api.http.bodies import ChoicesBody

CHOICES = {"none": ToolChoice("none"), "auto": ToolChoice("auto"), "required": ToolChoice("required")}


class ToolFunction(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def tool(self) -> Tool:
        return Tool(self.name, self.description, self.parameters, bool(self.strict))


class FunctionTool(msgspec.Struct):
    type: str
    function: ToolFunction


class FunctionName(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    type: str
    function: FunctionName


class ToolBody(ChoicesBody, kw_only=True):
    """The fields of a chat's body that say which tools may be called. Functions are OpenAI's older form."""

    tools: list[FunctionTool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    functions: list[ToolFunction] | None = None
    function_call: str | FunctionName | None = None

    @property
    def tooling(self) -> Tooling:
        """What the body says about tools, whose choice is one of the served words."""
        tools = [each.function for each in self.tools or ()] or (self.functions or ())
        named = self.tool_choice.function if isinstance(self.tool_choice, NamedTool) else self.tool_choice
        named = named or self.function_call or "auto"
        return Tooling(
            tools=tuple(function.tool for function in tools),
            choice=CHOICES[named] if isinstance(named, str) else ToolChoice("required", named.name),
            parallel=self.parallel_tool_calls is not False and not self.functions,
        )

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        for place, tool in enumerate(self.tools or ()):
            if tool.type != "function":
                yield Violation(f"tools[{place}].type", f"{tool.type[:100]!r} is not served: function is")
        if self.tools and self.functions:
            yield Violation("functions", "not together with tools")
        for name, words in (("tool_choice", CHOICES), ("function_call", ("none", "auto"))):
            word = getattr(self, name)
            if isinstance(word, str) and word not in words:
                yield Violation(name, f"not one of {', '.join(words)}, nor a function's name in an object")
                return
        for wrong in self.tooling.violations(".function"):
            yield Violation(wrong.field if self.tools or self.tool_choice else _older(wrong.field), wrong.problem)


def _older(field: str) -> str:
    """Return the name that the older form has for a field of the newer one."""
    return field.replace(".function", "").replace("tools", "functions").replace("tool_choice", "function_call")


def message_of(parts: Sequence[Part], is_whole: bool, has_functions: bool) -> dict[str, Any]:
    """Return the fields of a message, or of a stream's delta, that these parts have.

    has_functions: whether the body had OpenAI's older form, in which an answer has one call at most.
    """
    text = "".join(part.text for part in parts if isinstance(part, AnswerText))
    thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        match part:
            case CallBegin(index=index, id=call_id, name=name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
            case CallArguments(index=index, text=piece):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += piece
    message: dict[str, Any] = {"content": text or None if is_whole and calls else text}
    if not text and (thought or calls) and not is_whole:
        del message["content"]
    if thought:
        message["reasoning_content"] = thought
    if calls and has_functions:
        message["function_call"] = calls[0]["function"]
    elif calls:
        message["tool_calls"] = [*calls.values()]
        for call in message["tool_calls"] if is_whole else ():
            del call["index"]
    return message
