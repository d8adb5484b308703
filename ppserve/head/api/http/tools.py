"""Tools in the words of OpenAI's chats: what a body asks for, and an answer's parts as fields of its message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import msgspec

from ppserve.errors import Violation
from ppserve.head.api.answer_parts.parts import AnswerText, CallArguments, CallBegin, Part, Reasoning
from ppserve.head.api.answer_parts.tools import Tool, ToolChoice, Tooling
from ppserve.head.api.http.bodies import ChoicesBody

CHOICES = {"none": ToolChoice("none"), "auto": ToolChoice("auto"), "required": ToolChoice("required")}
FUNCTION_CALLS = ("none", "auto")
FUNCTION, ALLOWED = "function", "allowed_tools"


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


class AllowedTool(msgspec.Struct):
    type: str
    function: FunctionName


class AllowedTools(msgspec.Struct):
    """The tools that may be called. mode: `auto` or `required`."""

    mode: str
    tools: list[AllowedTool]


class ChosenTools(msgspec.Struct):
    """The function that must be called, or those that may be."""

    type: str
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    @property
    def choice(self) -> ToolChoice | None:
        """Which tools are called; None for a choice that is not served."""
        if self.type == ALLOWED and self.allowed_tools is not None:
            of_functions = (tool for tool in self.allowed_tools.tools if tool.type == FUNCTION)
            return allowing(self.allowed_tools.mode, (tool.function.name for tool in of_functions))
        if self.type == FUNCTION and self.function is not None:
            return ToolChoice("required", self.function.name)
        return None


def allowing(mode: str, names: Iterable[str]) -> ToolChoice | None:
    """Return the choice of `allowed_tools`; None for a mode that is not known."""
    return replace(CHOICES[mode], allowed=tuple(names)) if mode in ("auto", "required") else None


class ToolBody(ChoicesBody, kw_only=True):
    """The fields of a chat's body that say which tools may be called. Functions are OpenAI's older form."""

    tools: list[FunctionTool] | None = None
    tool_choice: str | ChosenTools | None = None
    parallel_tool_calls: bool | None = None
    functions: list[ToolFunction] | None = None
    function_call: str | FunctionName | None = None

    @cached_property
    def tooling(self) -> Tooling:
        """What the body says about tools, whose choice is one of the served words."""
        tools = [each.function for each in self.tools or ()] or (self.functions or ())
        return Tooling(
            tools=tuple(function.tool for function in tools),
            choice=self._choice or ToolChoice(),
            parallel=self.parallel_tool_calls is not False and not self.functions,
        )

    @property
    def _choice(self) -> ToolChoice | None:
        """Which tools are called; None for a choice that is not served."""
        match self.tool_choice or self.function_call or "auto":
            case str(word):
                return CHOICES.get(word)
            case FunctionName(name=name):
                return ToolChoice("required", name)
            case chosen:
                return chosen.choice

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        for place, tool in enumerate(self.tools or ()):
            if tool.type != FUNCTION:
                yield Violation(f"tools[{place}].type", f"{tool.type[:100]!r} is not served: function is")
        if self.tools and self.functions:
            yield Violation("functions", "not together with tools")
        if isinstance(self.function_call, str) and self.function_call not in FUNCTION_CALLS:
            yield Violation("function_call", f"not one of {', '.join(FUNCTION_CALLS)}, nor a function's name")
        elif self._choice is None:
            yield Violation("tool_choice", f"not one of {', '.join(CHOICES)}, nor a {FUNCTION}, nor {ALLOWED}")
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
