"""What every door for chats makes of its body: messages as chat templates take them, which become the prompt."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from ppserve.errors import InvalidRequest, Violation, refuse
from ppserve.head.api.answer_parts.answer_format import AnswerPlan
from ppserve.head.api.answer_parts.tools import NO_TOOLS, Tooling
from ppserve.head.api.chat_template import MAX_MESSAGES, NO_TEMPLATE, ROLES
from ppserve.head.api.http.asked import Asked
from ppserve.head.api.http.responses import HttpError, encode
from ppserve.head.api.request_handler import RequestHandler
from ppserve.head.options import GenerationOptions


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """One message. field: where the body has it, for errors. shown: the message as templates are given it."""

    field: str
    shown: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one speaker says in doors where that comes in pieces: adjacent turns of one speaker are one message."""

    field: str
    role: str
    texts: Sequence[str] = ()
    reasoning: Sequence[str] = ()
    calls: Sequence[Mapping[str, Any]] = ()
    result_of: str | None = None  # the id of the call whose result it is

    @property
    def is_empty(self) -> bool:
        return not (self.texts or self.reasoning or self.calls) and self.result_of is None


def call_of(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the call of a function as templates are shown it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def lacking(place: str, part: Any, needs: Mapping[str, Sequence[str]]) -> Iterator[Violation]:
    """Yield what is wrong with a part's type, or missing for it. needs: the fields of each type that is served."""
    if part.type not in needs:
        yield Violation(f"{place}.type", f"not one of {', '.join(needs)}")
    for name in needs.get(part.type, ()):
        if getattr(part, name) is None:
            yield Violation(f"{place}.{name}", "missing")


_JSON = json.JSONDecoder(strict=False)  # models write line ends in strings
_BLANKS = re.compile(r"\s*")


def read_arguments(text: str | None) -> dict[str, Any]:
    """Return the arguments of a call that are given as JSON. Where that is cut, or no object, these are the
    members that are whole: a conversation goes on with what its model has written."""
    return dict(_whole_members(text or ""))


def _whole_members(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the members of an object in JSON, as far as they are whole and can be written as UTF-8."""
    at, end = _after_blanks(text, 0), "{"
    while text[at : at + 1] == end and end != "}":
        try:
            name, at = _JSON.raw_decode(text, _after_blanks(text, at + 1))
            at = _after_blanks(text, at)
            if not isinstance(name, str) or text[at : at + 1] != ":":
                return
            value, at = _JSON.raw_decode(text, _after_blanks(text, at + 1))
            encode((name, value))
        except (ValueError, RecursionError):
            return
        at = _after_blanks(text, at)
        end = text[at : at + 1]
        if end not in (",", "}"):
            return
        yield name, value


def _after_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    return at if found is None else found.end()


def reasoning_variables(thinks: bool | None, effort: str | None) -> dict[str, Any]:
    """Return the variables by which templates are told whether and how long the model thinks; None says nothing.
    Some call the first `enable_thinking`, and others `thinking`."""
    given = {"enable_thinking": thinks, "thinking": thinks, "reasoning_effort": effort}
    return {name: value for name, value in given.items() if value is not None}


def to_messages(turns: Iterable[Turn]) -> list[ShownMessage]:
    """Return the messages of these turns. Many templates want speakers to alternate."""
    said = (turn for turn in turns if not turn.is_empty)
    return [_message(list(adjacent)) for _, adjacent in groupby(said, lambda turn: (turn.role, turn.result_of))]


def _message(turns: Sequence[Turn]) -> ShownMessage:
    first, texts = turns[0], [text for turn in turns for text in turn.texts]
    # A text by itself is no part, of which some templates know nothing.
    parts = "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]
    shown: dict[str, Any] = {"role": first.role, "content": parts}
    if reasoning := [text for turn in turns for text in turn.reasoning]:
        shown["reasoning_content"] = "\n".join(reasoning)
    if calls := [call for turn in turns for call in turn.calls]:
        shown["tool_calls"] = calls
    if first.result_of is not None:
        shown["tool_call_id"] = first.result_of
    return ShownMessage(first.field, shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedChat:
    """A chat that is to be answered. Raises InvalidRequest where it has no messages, or too many."""

    messages: Sequence[ShownMessage]
    variables: Mapping[str, Any]  # of the template, beside the messages
    continues: bool = False  # whether the answer is the rest of the last message
    tooling: Tooling = NO_TOOLS
    field: str = "messages"  # where the body has the messages

    def __post_init__(self) -> None:
        if not 1 <= len(self.messages) <= MAX_MESSAGES:
            problem = f"{len(self.messages)} messages; 1 to {MAX_MESSAGES} are allowed"
            raise InvalidRequest([Violation(self.field, problem)])

    async def asked(
        self, handler: RequestHandler, caller: str, options: GenerationOptions, surrounds: bool = False
    ) -> Asked:
        """Return the tokens of what the chat template makes of it, and how its answers are generated and read.
        Raises RequestError.

        surrounds: whether the tokenizer's own tokens are put around that. As in vLLM, the template writes them.
        """
        if handler.template is None:
            raise HttpError(400, "NO_CHAT_TEMPLATE", NO_TEMPLATE)
        roles, known = handler.template.roles, f"{', '.join(ROLES)}, nor one of the template's"
        others = (message for message in self.messages if message.shown["role"] not in roles)
        refuse(Violation(f"{message.field}.role", f"not one of {known}") for message in others)
        shown = [message.shown for message in self.messages]
        variables = {"add_generation_prompt": not self.continues, **self.variables}
        if self.tooling.offered:
            variables["tools"] = [tool.for_template() for tool in self.tooling.offered]
        rendering = asyncio.ensure_future(handler.template.render(caller, shown, variables, self.continues))
        # Nobody hears of its error once the caller has gone.
        rendering.add_done_callback(lambda done: done.cancelled() or done.exception())
        parts = await asyncio.shield(rendering)
        # Only the template's own words begin a reasoning.
        plan = handler.template.answers.plan(self.tooling, parts[-1] if variables["add_generation_prompt"] else "")
        prompt = await handler.tokenize(self.field, *parts, surrounds=surrounds)
        return Asked([prompt], planned(options, plan), plan)


def planned(options: GenerationOptions, plan: AnswerPlan) -> GenerationOptions:
    """Return the options with what a plan needs. Raises InvalidRequest where the answer would have two forms."""
    if plan.shows_special:
        options = replace(options, skip_special_tokens=False)
    if plan.form is None:
        return options
    if options.structured_output is not None:
        raise InvalidRequest([Violation("structured_output", "not together with tools that must be called")])
    return replace(options, structured_output=plan.form)
