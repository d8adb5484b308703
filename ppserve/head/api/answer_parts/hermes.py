"""Hermes, Qwen and those trained like them: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence

from ppserve.head.api.answer_parts.json_calls import Calls, read_calls
from ppserve.head.api.answer_parts.parts import AnswerText
from ppserve.head.api.answer_parts.source import NotACall, Parsing, Source
from ppserve.head.api.answer_parts.tool_format import FormPart, ToolFormat, either, json_object
from ppserve.head.api.answer_parts.tools import Tool

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    """JSON between tags. Text may stand in front of, between and behind calls."""

    name = "hermes"
    marker = BEGIN
    special = (BEGIN, END)

    def is_shown_by(self, template: str) -> bool:
        return BEGIN in template and '"arguments"' in template and "<function=" not in template

    def read(self, source: Source, calls: Calls) -> Parsing[None]:
        while (yield from source.until((BEGIN,), AnswerText, holds=True)):
            try:
                yield from self.read_calls(source, calls)
            except NotACall:
                yield from source.release()
                continue
            if (yield from source.until((BEGIN, END), None)) == BEGIN:
                source.unread(BEGIN)
            yield from source.next_visible()

    def read_calls(self, source: Source, calls: Calls) -> Parsing[None]:
        """Read what stands behind a tag. Raises AnswerEnds, and NotACall before a call's name is known."""
        yield from read_calls(source, calls)

    def calls_after_marker(self, tools: Sequence[Tool], max_calls: int | None) -> FormPart:
        call: FormPart = ["\n", either([json_object(tool) for tool in tools]), "\n" + END]
        return call if max_calls == 1 else [call, {"any_number": ["\n" + BEGIN, call]}]
