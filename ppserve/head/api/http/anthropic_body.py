"""What requests of /v1/messages hold: Anthropic's form of chats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import msgspec

from ppserve.errors import Violation
from ppserve.head.api.answer_parts.tools import Tool, ToolChoice, Tooling
from ppserve.head.api.asked_chat import AskedChat
from ppserve.head.api.http.bodies import GenerationBody
from ppserve.head.api.http.conversation import (
    Turn,
    call_of,
    lacking,
    reasoning_variables,
    to_messages,
)
from ppserve.head.api.http.forms import AskedForm, TextFormat, of_text_format
from ppserve.head.api.http.unserved import OF_ALL, OF_MESSAGES, OF_NEWER, Neutral
from ppserve.head.options import GenerationOptions

# A coding agent's first block of `system` begins so. It differs in every request: with it, no prefix of a prompt
# would be found in the cache.
_BILLING = "x-anthropic-billing-header:"
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
"""The fields that a block of this type has. Other types are not served."""

THINKING = ("disabled", "enabled", "adaptive", "between_tools")


class ContentBlock(msgspec.Struct):
    """A block of a message's content, with the fields of all types that are served."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None

    def violations(self, place: str) -> Iterator[Violation]:
        yield from lacking(place, self, _NEEDS)
        if self.type == "tool_result" and isinstance(self.content, list):
            yield from _only_texts(f"{place}.content", self.content)


class AnthropicMessage(msgspec.Struct):
    role: str
    content: str | list[ContentBlock]

    def violations(self, place: str) -> Iterator[Violation]:
        for number, block in enumerate(self.content if isinstance(self.content, list) else ()):
            yield from block.violations(f"{place}.content[{number}]")

    def turns(self, place: str) -> Iterator[Turn]:
        """Yield a turn for each result of a tool, and one for all else."""
        if isinstance(self.content, str):
            yield Turn(field=place, role=self.role, texts=[self.content])
            return
        of_type: dict[str, list[ContentBlock]] = {kind: [] for kind in _NEEDS}
        for block in self.content:
            of_type[block.type].append(block)
        for result in of_type["tool_result"]:
            yield Turn(field=place, role="tool", texts=_texts(result.content), result_of=result.tool_use_id)
        calls = [call_of(call.id or "", call.name or "", call.input or {}) for call in of_type["tool_use"]]
        yield Turn(
            field=place,
            role=self.role,
            texts=_texts(of_type["text"]),
            reasoning=[block.thinking or "" for block in of_type["thinking"]],
            calls=calls,
        )


class AnthropicTool(msgspec.Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    def violations(self, place: str) -> Iterator[Violation]:
        if self.type not in (None, "custom"):
            yield Violation(f"{place}.type", f"{self.type[:100]!r} is not served: custom is")
        elif self.input_schema is None:
            yield Violation(f"{place}.input_schema", "missing")

    @property
    def tool(self) -> Tool:
        return Tool(self.name, self.description, self.input_schema, bool(self.strict))


class AnthropicToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def choice(self) -> ToolChoice | None:
        """Which tools must be called; None for a type that is not known, or that lacks the tool's name."""
        if self.type == "tool":
            return None if self.name is None else ToolChoice("required", self.name)
        return _CHOICES.get(self.type)


_CHOICES = {"auto": ToolChoice("auto"), "any": ToolChoice("required"), "none": ToolChoice("none")}


class Thinking(msgspec.Struct):
    """Whether the model reasons first. Its budget is not counted: `max_tokens` bounds both."""

    type: str
    budget_tokens: int | None = None


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: TextFormat | None = None


class MessagesBody(GenerationBody, kw_only=True):
    """The body of /v1/messages."""

    unserved: ClassVar[Mapping[str, Neutral]] = {**OF_ALL, **OF_NEWER, **OF_MESSAGES}

    messages: list[AnthropicMessage]
    system: str | list[ContentBlock] | None = None
    max_tokens: int | None = None
    stop: list[str] | None = msgspec.field(default=None, name="stop_sequences")
    thinking: Thinking | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: TextFormat | None = None
    """The older name of the configuration's `format`."""

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        if isinstance(self.system, list):
            yield from _only_texts("system", self.system)
        for place, message in enumerate(self.messages):
            yield from message.violations(f"messages[{place}]")
        if self.thinking is not None and self.thinking.type not in THINKING:
            yield Violation("thinking.type", f"not one of {', '.join(THINKING)}")
        for place, tool in enumerate(self.tools or ()):
            yield from tool.violations(f"tools[{place}]")
        if self.tool_choice is not None and self.tool_choice.choice is None:
            yield Violation("tool_choice", f"not one of {', '.join(_CHOICES)}, nor tool with its name")
        yield from self.tooling.violations(parameters="input_schema")

    @property
    def thinks(self) -> bool:
        """Whether the caller wants to see what the model thinks."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @cached_property
    def tooling(self) -> Tooling:
        """What the body says about tools."""
        named = self.tool_choice or AnthropicToolChoice("auto")
        return Tooling(
            tools=tuple(tool.tool for tool in self.tools or ()),
            choice=named.choice or ToolChoice(),
            parallel=not named.disable_parallel_tool_use,
        )

    def own_forms(self) -> Iterator[AskedForm]:
        format = None if self.output_config is None else self.output_config.format
        yield from of_text_format("output_config.format", format)
        yield from of_text_format("output_format", self.output_format)

    def keep(self, given: dict[str, Any]) -> None:
        super().keep(given)
        _ = self.prompts

    @cached_property
    def prompts(self) -> Sequence[AskedChat]:
        turns = [Turn(field="system", role="system", texts=[text]) for text in self._system()]
        for place, message in enumerate(self.messages):
            turns += message.turns(f"messages[{place}]")
        messages = to_messages(turns)
        effort = None if self.output_config is None else self.output_config.effort or None
        last = messages[-1].shown if messages else {}
        chat = AskedChat(
            messages=messages,
            variables=reasoning_variables(self.thinks, effort),
            continues=last.get("role") == "assistant" and bool(last["content"]) and "tool_calls" not in last,
            tooling=self.tooling,
            form=self.form,
        )
        return [chat]

    def _system(self) -> Iterator[str]:
        """Yield the texts of the system prompt, without the line that differs in every request."""
        for text in _texts(self.system):
            shown = text.partition("\n")[2] if text.startswith(_BILLING) else text
            if shown:
                yield shown

    def options(self) -> GenerationOptions:
        return replace(super().options(), max_tokens=self.max_tokens, stop=self.stop)

    @property
    def names(self) -> dict[str, str]:
        return {**super().names, "prompt": "messages", "stop.stop": "stop_sequences"}


def _texts(content: str | Sequence[ContentBlock] | None) -> list[str]:
    return [content] if isinstance(content, str) else [block.text or "" for block in content or ()]


def _only_texts(place: str, blocks: Sequence[ContentBlock]) -> Iterator[Violation]:
    for number, block in enumerate(blocks):
        if block.type != "text" or block.text is None:
            yield Violation(f"{place}[{number}]", "only text is served")
