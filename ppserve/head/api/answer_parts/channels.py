"""gpt-oss's messages: each has a channel, and a recipient where it calls a tool."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ppserve.head.api.answer_parts.json_calls import Calls
from ppserve.head.api.answer_parts.parts import AnswerText, Reasoning
from ppserve.head.api.answer_parts.source import Parsing, Source
from ppserve.head.api.answer_parts.tool_format import ANY_TEXT, FormPart, ToolFormat, arguments_of, either
from ppserve.head.api.answer_parts.tools import Tool

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN, START, CHANNEL)
FUNCTIONS = "functions."

_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.:/-]+)")


class Channels(ToolFormat):
    """Reasoning, text and calls as messages on the channels `analysis`, `final` and `commentary`."""

    name = "channels"
    special = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

    def is_shown_by(self, template: str) -> bool:
        return CHANNEL in template and MESSAGE in template

    # ---- reading ----

    def is_begun_by(self, _prompt: str) -> bool:
        return False

    def read_reasoning(self, source: Source, calls: Calls, _has_begun: bool) -> Parsing[None]:
        """Read the whole answer: the channels say what is reasoning."""
        yield from self.read(source, calls)

    def read(self, source: Source, calls: Calls) -> Parsing[None]:
        source.hold()
        yield from source.next_visible()
        if (first := (yield from source.starts_with(CHANNEL, START, "to="))) is None:
            yield from source.release()
            first = yield from source.until(ENDS, AnswerText)
        source.let_go()
        source.unread(first or "")
        while True:
            header = yield from source.text_until(MESSAGE)
            end = yield from _read_message(header, source, calls)
            if end in (START, CHANNEL):
                source.unread(end)

    # ---- forms ----

    def reasoning(self, _has_begun: bool) -> FormPart:
        return {"maybe": _message("analysis")}

    def calls_after_marker(self, tools: Sequence[Tool], _max_calls: int | None) -> FormPart:
        """Return the form of one call: an answer ends with it."""
        return either(
            [
                [f"{CHANNEL}commentary to={FUNCTIONS}{tool.name} {CONSTRAIN}json{MESSAGE}", arguments_of(tool)]
                for tool in tools
            ]
        )

    def text_and_calls(self, tools: Sequence[Tool], max_calls: int | None) -> FormPart:
        final: FormPart = [f"{CHANNEL}final{MESSAGE}", ANY_TEXT]
        return [{"any_number": _message("commentary")}, either([final, self.calls(tools, max_calls)])]

    def calls_or_text(self, tools: Sequence[Tool], max_calls: int | None, text: FormPart) -> FormPart:
        return super().calls_or_text(tools, max_calls, [f"{CHANNEL}final{MESSAGE}", text])


CHANNELS = Channels()


def _message(channel: str) -> FormPart:
    """Return the form of a message that another one follows."""
    return [f"{CHANNEL}{channel}{MESSAGE}", {"until": END}, f"{START}assistant"]


def _read_message(header: str, source: Source, calls: Calls) -> Parsing[str | None]:
    """Read a message behind its header, and return what ends it; None at the end of the answer."""
    channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
    if recipient is None:
        is_thought = channel is not None and channel[1] == "analysis"
        return (yield from source.until(ENDS, Reasoning if is_thought else AnswerText))
    yield calls.begin(source, recipient[1].removeprefix(FUNCTIONS))
    end = yield from source.until(ENDS, calls.arguments)
    if end is not None or not source.is_cut:
        yield from calls.end()
    return end
