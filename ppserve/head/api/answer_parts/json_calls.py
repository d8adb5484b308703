"""Calls that are JSON objects with a name and arguments, as most formats have them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ppserve.head.api.answer_parts.parts import CallArguments, CallBegin, CallEnd, Part
from ppserve.head.api.answer_parts.source import NotACall, Parsing, Source

ARGUMENTS = ("arguments", "parameters")
OTHERS = ("type", "id")
"""Keys that may stand in front of a call's name. Any other one shows that the object is no call."""


class Calls:
    """Numbers the calls of one answer as they begin."""

    def __init__(self, new_id: Callable[[int], str], schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """new_id: makes the id of a call from its number. schemas: of the arguments of the tools that are offered,
        by their names."""
        self.schemas = schemas
        self._new_id = new_id
        self.count = 0
        self.has_arguments = False
        """Whether the latest call has any."""

    def begin(self, source: Source, name: str) -> CallBegin:
        """Begin a call: what the source holds was no text."""
        source.let_go()
        self.count += 1
        self.has_arguments = False
        return CallBegin(self.count - 1, self._new_id(self.count - 1), name)

    def arguments(self, text: str) -> CallArguments:
        """Return a piece of the latest call's arguments."""
        self.has_arguments = True
        return CallArguments(self.count - 1, text)

    def end(self) -> Iterator[Part]:
        """End the latest call. One without arguments has an empty object."""
        if not self.has_arguments:
            yield self.arguments("{}")
        yield CallEnd(self.count - 1)


def read_calls(source: Source, calls: Calls, any_name: bool = True) -> Parsing[None]:
    """Read one call or a list of calls. any_name: whether a call may name a tool that is not offered.

    Raises AnswerEnds, and NotACall before the first call's name is known.
    """
    if (yield from source.next_visible()) != "[":
        yield from read_call(source, calls, any_name)
        return
    source.skip()
    yield from read_call(source, calls, any_name)
    while (yield from source.next_visible()) == ",":
        source.hold()
        source.skip()
        yield from read_call(source, calls, any_name)
    yield from source.starts_with("]")


def read_call(source: Source, calls: Calls, any_name: bool = True) -> Parsing[None]:
    """Read one call. Once its name is known, text that is no JSON ends the call.

    Raises AnswerEnds, and NotACall before the name is known.
    """
    if (yield from source.next_visible()) != "{":
        raise NotACall
    source.skip()
    call = _CallReader(source, calls, any_name)
    try:
        while (yield from source.next_visible()) != "}":
            yield from call.read_member()
            if (yield from source.next_visible()) == ",":
                source.skip()
        source.skip()
    except NotACall:
        if not call.has_begun:
            raise
    if not call.has_begun:
        raise NotACall
    yield from calls.end()


class _CallReader:
    """One object that may be a call."""

    def __init__(self, source: Source, calls: Calls, any_name: bool) -> None:
        self._source = source
        self._calls = calls
        self._any_name = any_name
        self._early: str | None = None
        """Arguments that stand in front of the name."""
        self.has_begun = False

    def read_member(self) -> Parsing[None]:
        """Read one name and its value. Raises NotACall and AnswerEnds."""
        source = self._source
        key = yield from self._string()
        if (yield from source.next_visible()) != ":":
            raise NotACall
        source.skip()
        first = yield from source.next_visible()
        if key == "name" and not self.has_begun:
            yield from self._read_name()
        elif key in ARGUMENTS and not self.has_begun:
            self._early = _decoded((yield from source.json()))
        elif key in ARGUMENTS and not self._calls.has_arguments and first in '"n':
            yield self._calls.arguments(_decoded((yield from source.json())))
        elif key in ARGUMENTS and not self._calls.has_arguments:
            yield from source.json(self._calls.arguments)
        elif key in OTHERS or self.has_begun:
            yield from source.json()
        else:
            raise NotACall

    def _read_name(self) -> Parsing[None]:
        name = yield from self._string()
        if not self._any_name and name not in self._calls.schemas:
            raise NotACall
        self.has_begun = True
        yield self._calls.begin(self._source, name)
        if self._early:
            yield self._calls.arguments(self._early)

    def _string(self) -> Parsing[str]:
        if (yield from self._source.next_visible()) != '"':
            raise NotACall
        return str(_loaded((yield from self._source.json())))


def _loaded(text: str) -> Any:
    """Read a text as JSON. Raises NotACall for a text that is no JSON."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise NotACall from None


def _decoded(text: str) -> str:
    """Return the arguments as JSON text. Some models write that text as a string, and null for none."""
    if text == "null":
        return "{}"
    inner = _loaded(text) if text.startswith('"') else None
    return inner if isinstance(inner, str) and inner.lstrip().startswith("{") else text
