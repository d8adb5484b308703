"""Calls without a marker: an answer that begins with a JSON object that names a tool."""

from __future__ import annotations

from collections.abc import Sequence

from ppserve.errors import InvalidRequest, Violation
from ppserve.head.api.answer_parts.json_calls import Calls, read_call, read_calls
from ppserve.head.api.answer_parts.source import NotACall, Parsing, Source
from ppserve.head.api.answer_parts.tool_format import NO_JSON, FormPart, ToolFormat, either, json_object
from ppserve.head.api.answer_parts.tools import Tool


class BareJson(ToolFormat):
    """One call, several behind semicolons, or a list of them. Any other JSON is text."""

    key = "arguments"
    prefix: str | None = None
    """What may stand in front of the first call."""

    def read(self, source: Source, calls: Calls) -> Parsing[None]:
        source.hold()
        yield from source.next_visible()
        if self.prefix is not None:
            yield from source.starts_with(self.prefix)
        try:
            yield from read_calls(source, calls, any_name=False)
            while (yield from source.next_visible()) in ";{":
                source.hold()
                yield from source.starts_with(";")
                yield from read_call(source, calls, any_name=False)
        except NotACall:
            yield from source.release()

    def calls_after_marker(self, tools: Sequence[Tool], max_calls: int | None) -> FormPart:
        call = either([json_object(tool, self.key) for tool in tools])
        return call if max_calls == 1 else [call, {"any_number": ["; ", call]}]

    def text_and_calls(self, tools: Sequence[Tool], max_calls: int | None) -> FormPart:
        return {"either": [self.calls(tools, max_calls), NO_JSON]}

    def calls_or_text(self, tools: Sequence[Tool], max_calls: int | None, text: FormPart) -> FormPart:
        problem = f"not together with tools: in the format {self.name}, a call and other JSON begin alike"
        raise InvalidRequest([Violation("structured_output", problem)])


class FallbackJson(BareJson):
    """The format of calls that must be made, for models whose own format is not known."""

    name = "json"

    def is_shown_by(self, _template: str) -> bool:
        return False


BARE_JSON = FallbackJson()
