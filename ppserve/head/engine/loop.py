"""The engine: one thread that handles all messages and keeps the pipeline full.

Requests, cancellations, results of stages and the end of a stage's connection are messages. Other threads put
theirs into the inbox and wake the engine; all are handled in this thread, so nothing needs a lock. The engine
sleeps until a message arrives, at most 0.1 s: deadlines and silent ranks are checked that often. In each turn it
sends new plans first, because stages may be waiting for them, then turns tokens into text and hands the outputs of
all streams over in one call. With one exception: a token that ends its answer, or whose text may end it, becomes
text before the plans are made, because these depend on it; so do the tokens before it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from ppserve.core.request import FinishReason, Request
from ppserve.core.scheduling.sequence import SequenceEvent
from ppserve.errors import Draining, RequestError, StagesLost
from ppserve.head.engine.control import ControlPlane
from ppserve.head.engine.fleet import Fleet
from ppserve.head.engine.member import FatalError, Formed
from ppserve.head.engine.messages import Abort, Drain, Message, Restart, Snapshot, Stop, Submit
from ppserve.head.engine.open_request import HeldAnswer, OpenRequest
from ppserve.head.engine.output import Sink, TokenOutput
from ppserve.head.engine.reading import ReplicaReading
from ppserve.head.engine.replica import ReplicaEvent
from ppserve.head.engine.watcher import Watcher
from ppserve.process.environment import EXIT_FAILED, EXIT_USAGE
from ppserve.tokenizer import Tokenizer

log = logging.getLogger("ppserve.engine")

_TICK_S = 0.1
_GOODBYE_S = 5.0
_ANSWER_WITHIN_S = 5.0


class Engine(threading.Thread):
    """Owns the open requests and drives the replicas.

    hand_over: runs a function in the thread of the sinks (`loop.call_soon_threadsafe`). formed: done when every
    replica has formed for the first time. failed: done when none will form again.
    """

    def __init__(
        self,
        fleet: Fleet,
        control: ControlPlane,
        watcher: Watcher,
        hand_over: Callable[[Callable[[], None]], object],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        super().__init__(name="engine", daemon=True)
        self.formed: Future[None] = Future()
        self.failed: Future[FatalError] = Future()
        self._fleet = fleet
        self._control = control
        self._watcher = watcher
        self._hand_over = hand_over
        self._clock = clock
        self._inbox: deque[Message] = deque()
        self._open: dict[str, OpenRequest] = {}
        self._later: list[SequenceEvent] = []  # what this turn publishes once its plans are sent
        self._outputs: dict[Sink, list[TokenOutput]] = {}
        self._stopping = self._ended = self._is_unbalanced = False

    # ---- for other threads ----------------------------------------------------------------------------

    def submit(
        self, request: Request, sink: Sink, tokenizer: Tokenizer | None, held: HeldAnswer | None = None
    ) -> Future[None]:
        """Queue a request. Its outputs go to `sink`. held: of a request that resumes an answer (`read_held`). The
        future is done when it is queued, or has a RequestError."""
        message = Submit(request, sink, tokenizer, held)
        self._post(message)
        return message.accepted

    def cancel(self, request_id: str, reason: FinishReason) -> None:
        """End a request. Nothing happens if it has ended."""
        self._post(Abort(request_id, reason))

    def snapshot(self) -> tuple[ReplicaReading, ...]:
        """The state of every replica. Waits for the engine's thread. Raises Draining if the engine has ended."""
        message = Snapshot()
        self._post(message)
        return message.readings.result(_ANSWER_WITHIN_S)

    def restart(self, replica: int, pauses: bool) -> Future[None]:
        """Restart a replica's stage processes; see `messages.Restart`."""
        message = Restart(replica, pauses)
        self._post(message)
        return message.done

    def drain(self) -> None:
        """The server is stopping; see `messages.Drain`."""
        self._post(Drain())

    def give_up(self, fatal: FatalError) -> None:
        """End with this reason."""
        self._post(fatal)

    def stop(self) -> None:
        """Shut the stages down, in order, and end the thread."""
        self._post(Stop())

    def _post(self, message: Message) -> None:
        self._inbox.append(message)
        if self._ended:
            self._refuse_the_rest()
        else:
            self._control.wake()

    # ---- the loop -------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._fleet.start()
            while not self._stopping:
                self.turn()
        except Exception as error:
            log.exception("the engine failed")
            self._give_up(FatalError(f"internal error: {type(error).__name__}", usage=False))
        self._end_streams(_shutting_down())
        fatal = self.failed.result() if self.failed.done() else None
        code = 0 if fatal is None else EXIT_USAGE if fatal.usage else EXIT_FAILED
        self._fleet.shut_down(code)
        self._ended = True
        self._refuse_the_rest()
        self._control.close(_GOODBYE_S)

    def turn(self) -> None:
        """Handles all that has happened since the last turn. Public for those who drive an engine by hand."""
        heard = self._control.poll(_TICK_S if not self._inbox else 0.0)
        woken_ns = self._clock()
        for message in heard:
            self._happened(self._fleet.take(message))
        while self._inbox and not self._stopping:
            self._take(self._inbox.popleft())
        self._happened(self._fleet.tick())
        self._note_demand()
        self._fleet.refill(woken_ns)
        self._publish_later()
        self._fleet.report_load()
        self._deliver()

    def _take(self, message: Message) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort(request_id, reason):
                if request_id in self._open:
                    self._happened(self._fleet.abort(request_id, reason))
            case Snapshot(readings):
                _settle(readings, self._fleet.readings)
            case Restart(replica, pauses, done):
                if done.set_running_or_notify_cancel():
                    self._restart(replica, pauses, done)
            case Drain():
                self._fleet.drain()
            case Stop():
                self._stopping = True
            case FatalError():
                self._give_up(message)

    def _happened(self, events: Iterable[ReplicaEvent]) -> None:
        for event in events:
            match event:
                case SequenceEvent():
                    self._later.append(event)
                    if self._may_end(event):
                        self._publish_later()
                case Formed():
                    self.formed.set_result(None)
                case FatalError():
                    self._give_up(event)

    def _refuse_the_rest(self) -> None:
        """Refuses messages that arrived after the last turn. Safe in any thread."""
        while self._inbox:
            try:
                message = self._inbox.popleft()
            except IndexError:  # another thread refused it
                return
            match message:
                case Submit(accepted=waiting) | Snapshot(readings=waiting) | Restart(done=waiting):
                    if waiting.set_running_or_notify_cancel():
                        waiting.set_exception(_shutting_down())

    # ---- requests -------------------------------------------------------------------------------------

    def _submit(self, asked: Submit) -> None:
        if not asked.accepted.set_running_or_notify_cancel():
            return  # its caller left before the request was queued
        try:
            self._admit(asked)
        except RequestError as error:
            self._watcher.refused(error)
            asked.accepted.set_exception(error)
        except Exception as error:
            log.exception("request %s could not be queued", asked.request.id)
            asked.accepted.set_exception(error)
        else:
            asked.accepted.set_result(None)

    def _admit(self, asked: Submit) -> None:
        """Raises RequestError."""
        now_s = self._clock() / 1e9
        opened = OpenRequest(asked.request, asked.sink, asked.tokenizer, now_s, self._fleet.busy_s)
        if asked.held is not None and (end := opened.resume(asked.held, now_s)) is not None:
            self._tell(opened, end, now_s)
            return
        self._fleet.submit(asked.request)
        self._open[asked.request.id] = opened

    def _restart(self, replica: int, pauses: bool, done: Future[None]) -> None:
        try:
            self._fleet.restart(replica, pauses, done)
        except RequestError as error:
            done.set_exception(error)

    def _may_end(self, event: SequenceEvent) -> bool:
        """Whether it, or its text, ends a sequence: what is scheduled next depends on that."""
        opened = self._open.get(event.request_id)
        return opened is None or event.is_terminal or bool(opened.request.stop.stop)

    def _publish_later(self) -> None:
        events, self._later = self._later, []
        for event in events:
            self._publish(event)

    def _publish(self, event: SequenceEvent) -> None:
        """Turns an event of the scheduler into an output of its stream."""
        opened = self._open.get(event.request_id)
        if opened is None or opened.has_ended(event.index):
            # One step may bring several tokens, and a stop string may end the answer at the first.
            if event.token_id is not None:
                self._fleet.request_queue.token_withheld(event.caller)
            return
        now_s = self._clock() / 1e9
        output = opened.output(event, now_s)
        if output.finish is FinishReason.STOP_STRING and event.finish is None:
            self._fleet.finish(event.sequence_id, FinishReason.STOP_STRING)
        self._tell(opened, output, now_s)
        if opened.is_complete:
            del self._open[event.request_id]

    def _tell(self, opened: OpenRequest, output: TokenOutput, now_s: float) -> None:
        self._outputs.setdefault(opened.sink, []).append(output)
        self._watcher.output(opened, output, now_s)

    def _deliver(self) -> None:
        """Hands this turn's outputs of all streams over in one call."""
        if self._outputs:
            outputs, self._outputs = self._outputs, {}
            self._hand_over(lambda: _push(outputs))

    def _note_demand(self) -> None:
        if self._fleet.demand(bool(self._open)) or self._is_unbalanced:
            return
        try:
            self._fleet.prove_idle()
        except AssertionError:
            self._is_unbalanced = True  # it stays so: once in the log is enough
            log.exception("KV blocks are not balanced")

    def _give_up(self, fatal: FatalError) -> None:
        """Ends every open stream with a status. `failed` has the reason."""
        self._stopping = True
        self._end_streams(StagesLost("a pipeline stage was lost and does not come back"))
        if not self.failed.done():
            self.failed.set_result(fatal)

    def _end_streams(self, error: RequestError) -> None:
        """Never raises: the stages must still be told to end."""
        try:
            self._publish_later()
        except Exception:
            log.exception("the latest tokens could not be told")
        try:
            now_s = self._clock() / 1e9
            for opened in self._open.values():
                self._tell(opened, opened.fail(error), now_s)
            self._deliver()
        except Exception:
            log.exception("streams could not be told of their end")
        self._open.clear()


def _shutting_down() -> Draining:
    return Draining("the server is shutting down")


def _settle(future: Future[tuple[ReplicaReading, ...]], answer: Callable[[], tuple[ReplicaReading, ...]]) -> None:
    try:
        future.set_result(answer())
    except Exception as error:
        future.set_exception(error)


def _push(outputs: dict[Sink, list[TokenOutput]]) -> None:
    for sink, news in outputs.items():
        sink.push(news)
