"""Mistral's calls, behind `[TOOL_CALLS]`: a list of JSON objects, or since version 11 a name and its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from ppserve.head.api.answer_parts.json_calls import Calls, read_calls
from ppserve.head.api.answer_parts.parts import AnswerText
from ppserve.head.api.answer_parts.source import NotACall, Parsing, Source
from ppserve.head.api.answer_parts.tool_format import FormPart, ToolFormat, arguments_of, either, json_object
from ppserve.head.api.answer_parts.tools import Tool

MARKER, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class Mistral(ToolFormat):
    """A list of calls. Both kinds are read, wherever they stand."""

    name = "mistral"
    marker = MARKER
    special = (MARKER, CALL_ID, ARGS)

    def is_shown_by(self, template: str) -> bool:
        return MARKER in template and ARGS not in template

    def read(self, source: Source, calls: Calls) -> Parsing[None]:
        while (yield from source.until((MARKER,), AnswerText, holds=True)):
            try:
                if (yield from source.next_visible()) in "[{":
                    yield from read_calls(source, calls)
                else:
                    yield from _read_named(source, calls)
            except NotACall:
                yield from source.release()
                continue
            yield from source.next_visible()

    def calls_after_marker(self, tools: Sequence[Tool], max_calls: int | None) -> FormPart:
        call = either([json_object(tool) for tool in tools])
        more: FormPart = "" if max_calls == 1 else {"any_number": [", ", call]}
        return [{"maybe": " "}, "[", call, more, "]"]


class Mistral11(Mistral):
    """A marker for each call, then its name and its arguments."""

    name = "mistral11"

    def is_shown_by(self, template: str) -> bool:
        return MARKER in template and ARGS in template

    def calls_after_marker(self, tools: Sequence[Tool], max_calls: int | None) -> FormPart:
        call = either([[tool.name + ARGS, arguments_of(tool)] for tool in tools])
        return call if max_calls == 1 else [call, {"any_number": [MARKER, call]}]


def _read_named(source: Source, calls: Calls) -> Parsing[None]:
    """Read a name, an id, which the answer gets from elsewhere, and arguments. Raises AnswerEnds and NotACall."""
    name = yield from source.word()
    if (yield from source.starts_with(CALL_ID, ARGS)) == CALL_ID:
        yield from source.word()
        yield from source.starts_with(ARGS)
    if not name or (yield from source.next_visible()) != "{":
        raise NotACall
    yield calls.begin(source, name)
    with suppress(NotACall):
        yield from source.json(calls.arguments)
    yield from calls.end()
