"""The open requests, and the outputs that their streams get at the end of the engine's turn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from ppserve.core.request import FinishReason
from ppserve.core.scheduling.request_queue import RequestQueue
from ppserve.core.scheduling.sequence import SequenceEvent
from ppserve.errors import RequestError
from ppserve.head.engine.observer import Observers
from ppserve.head.engine.open_request import OpenRequest, Sink, TokenOutput

log = logging.getLogger("ppserve.engine")

HandOver = Callable[[Callable[[], None]], object]
"""Runs a function in the thread of the sinks, such as `loop.call_soon_threadsafe`."""


class OpenStreams:
    """The streams of all open requests. The scheduler's events become outputs, which are delivered together.

    Tokens become text after the turn's plans were sent, because stages may be waiting for these. But a token that
    may end its sequence becomes text at once, with all tokens before it: what is scheduled next depends on that.
    """

    def __init__(self, request_queue: RequestQueue, observers: Observers, hand_over: HandOver) -> None:
        self._request_queue = request_queue
        self._observers = observers
        self._hand_over = hand_over
        self._open: dict[str, OpenRequest] = {}
        self._events: list[SequenceEvent] = []  # not published yet
        self._outputs: dict[Sink, list[TokenOutput]] = {}  # not delivered yet

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __len__(self) -> int:
        return len(self._open)

    def open(self, opened: OpenRequest) -> None:
        self._open[opened.request.id] = opened

    def add_events(self, events: Iterable[SequenceEvent], now_s: float) -> None:
        """Events of this turn, in their order."""
        for event in events:
            self._events.append(event)
            opened = self._open.get(event.request_id)
            if opened is None or event.is_terminal or opened.request.stop.stop:
                self.publish(now_s)

    def publish(self, now_s: float) -> None:
        """Turns all events so far into outputs."""
        events, self._events = self._events, []
        for event in events:
            self._publish_event(event, now_s)

    def _publish_event(self, event: SequenceEvent, now_s: float) -> None:
        opened = self._open.get(event.request_id)
        if opened is None or opened.progress(event.index).has_ended:
            return  # one step may bring several tokens, and a stop string may end the answer at the first
        output = opened.output(event, now_s)
        if output.finish is FinishReason.STOP_STRING and event.finish is None:
            self._request_queue.abort(event.request_id, FinishReason.STOP_STRING, event.index)
        self.add_output(opened, output, now_s)
        if opened.is_complete:
            del self._open[event.request_id]

    def add_output(self, opened: OpenRequest, output: TokenOutput, now_s: float) -> None:
        self._outputs.setdefault(opened.sink, []).append(output)
        for observer in self._observers:
            observer.on_output(opened, output, now_s)

    def deliver(self) -> None:
        """Hands this turn's outputs of all streams over in one call."""
        if self._outputs:
            outputs, self._outputs = self._outputs, {}
            self._hand_over(lambda: _push(outputs))

    def fail_all(self, error: RequestError, now_s: float) -> None:
        """Ends every stream. Never raises: the stages must still be told to exit."""
        try:
            self.publish(now_s)
        except Exception:
            log.exception("the latest tokens could not be published")
        try:
            for opened in self._open.values():
                self.add_output(opened, opened.fail(error), now_s)
            self.deliver()
        except Exception:
            log.exception("the ends of streams could not be delivered")
        self._open.clear()


def _push(outputs: dict[Sink, list[TokenOutput]]) -> None:
    for sink, of_sink in outputs.items():
        sink.push(of_sink)
