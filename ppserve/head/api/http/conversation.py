"""Makes messages, as chat templates take them, of the bodies of all paths for chats."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ppserve.errors import Violation
from ppserve.head.api.asked_chat import ShownMessage
from ppserve.head.api.http.responses import encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A piece of what one speaker says. Adjacent turns of one speaker become one message."""

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
    """Return the call of a function in the form in which templates get it."""
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
    """Return the arguments of a call, which are given as JSON.

    If that is cut, or is no object, these are the members that are whole: a conversation goes on with what its
    model has written.
    """
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
    """Return the variables that tell a template whether, and how long, the model thinks. None says nothing of it.

    Some templates call the first `enable_thinking`, and others `thinking`.
    """
    given = {"enable_thinking": thinks, "thinking": thinks, "reasoning_effort": effort}
    return {name: value for name, value in given.items() if value is not None}


def to_messages(turns: Iterable[Turn]) -> list[ShownMessage]:
    """Return the messages of these turns. Many templates want speakers to alternate, so adjacent turns are
    joined."""
    said = (turn for turn in turns if not turn.is_empty)
    return [_message(list(adjacent)) for _, adjacent in groupby(said, lambda turn: (turn.role, turn.result_of))]


def _message(turns: Sequence[Turn]) -> ShownMessage:
    first, texts = turns[0], [text for turn in turns for text in turn.texts]
    # One text is given as it is, and not as a list of parts, of which some templates know nothing.
    parts = "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]
    shown: dict[str, Any] = {"role": first.role, "content": parts}
    if reasoning := [text for turn in turns for text in turn.reasoning]:
        shown["reasoning_content"] = "\n".join(reasoning)
    if calls := [call for turn in turns for call in turn.calls]:
        shown["tool_calls"] = calls
    if first.result_of is not None:
        shown["tool_call_id"] = first.result_of
    return ShownMessage(first.field, shown)
