"""The heart: one thread that takes what happened, tells the scheduler, and keeps the pipeline full.

Requests, cancellations, results of stages and the loss of a stage are all one kind of thing: something
that came in. Nothing is polled and nothing is locked; other threads put calls into the inbox and wake
the loop. What streams are to hear crosses to the event loop once per turn, after the next plans are out,
because a stage may be waiting for those.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from ppserve import wire
from ppserve.core.plan import StepPlan, StepResult
from ppserve.core.request import FinishReason, Request
from ppserve.core.scheduling.lane_count import LaneCount
from ppserve.core.scheduling.scheduler import Scheduler
from ppserve.core.scheduling.sequence import SequenceEvent
from ppserve.errors import Draining, PpserveError, RequestError, StagesLost
from ppserve.head.engine.control import ControlPlane, Gone
from ppserve.head.engine.members import EpochLost, Formed, Hopeless, MemberEvent, Members, StageDied, StepDone
from ppserve.head.engine.open_request import OpenRequest
from ppserve.head.engine.output import Sink, TokenOutput
from ppserve.head.observe.observer import Observer
from ppserve.process.environment import EXIT_FAILED, EXIT_USAGE
from ppserve.tokenizer import Tokenizer

log = logging.getLogger("ppserve.engine")

_TICK_S = 0.1
# No step of any model here takes this long; a stage that owes one for longer is stuck.
_STEP_DEADLINE_S = 60.0
_GOODBYE_S = 5.0

T = TypeVar("T")


@dataclass(slots=True)
class _InFlight:
    """A step that not all stages have reported. owing: those whose result is still to come.

    was_full: with it, all lanes were in use.
    """

    plan: StepPlan
    sent_s: float
    owing: set[int]
    was_full: bool


class Engine(threading.Thread):
    """Owns the scheduler and the members. `make_scheduler` is called at the first epoch.

    lanes: chooses how many steps are in flight; None when the operator did. Made in the event loop.
    """

    def __init__(
        self,
        control: ControlPlane,
        members: Members,
        observer: Observer,
        make_scheduler: Callable[[Formed], Scheduler],
        lanes: LaneCount | None,
    ) -> None:
        super().__init__(name="engine", daemon=True)
        self._control = control
        self._members = members
        self._observer = observer
        self._make_scheduler = make_scheduler
        self._lanes = lanes
        self._loop = loop = asyncio.get_running_loop()
        self._inbox: deque[Callable[[float], None]] = deque()
        self._scheduler: Scheduler | None = None
        self._open: dict[str, OpenRequest] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._outputs: dict[Sink, list[TokenOutput]] = {}
        self._stopping = False
        self._hopeless: Hopeless | None = None
        self._woken_ns = 0
        self.tokenizer: Tokenizer | None = None
        self.formed: asyncio.Future[None] = loop.create_future()
        self.failed: asyncio.Future[Hopeless] = loop.create_future()

    # ---- for other threads ----------------------------------------------------------------------------

    async def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request; its outputs go to `sink`. Raises RequestError when it is refused."""
        if self._stopping:
            raise Draining("the server is shutting down")
        answered: asyncio.Future[None] = self._loop.create_future()

        def take(now_s: float) -> None:
            try:
                self._admit(request, sink, now_s)
            except RequestError as error:
                self._observer.refused(error)
                self._tell(answered, error)
            else:
                self._tell(answered, None)

        self._call(take)
        await answered

    def cancel(self, request_id: str, reason: FinishReason) -> None:
        """End a request wherever it is; nothing happens when it has ended. Safe from any thread."""
        self._call(lambda now_s: self._abort(request_id, reason, now_s))

    def ask(self, question: Callable[[float], T]) -> T:
        """The answer of `question`, run in the engine's thread, where all state is at rest.

        Raises Draining when that thread is ending.
        """
        if self._stopping:
            raise Draining("the server is shutting down")
        answer: Future[T] = Future()

        def run(now_s: float) -> None:
            try:
                answer.set_result(question(now_s))
            except Exception as error:
                answer.set_exception(error)

        self._call(run)
        return answer.result(timeout=5.0)

    def drain(self) -> None:
        """Streams may finish; a stage that is lost meanwhile is waited for less long."""

        def begin(_now_s: float) -> None:
            self._members.draining = True

        self._call(begin)

    def stop(self) -> None:
        """Shut the stages down, front to back, and end the thread."""

        def shut_down(_now_s: float) -> None:
            self._stopping = True

        self._call(shut_down)

    @property
    def microbatches(self) -> int:
        """Steps that may be in flight at once. To be asked in the engine's thread."""
        return 0 if self._scheduler is None else self._scheduler.microbatches

    @property
    def max_chunk(self) -> int:
        """Prompt tokens that a step takes at most. To be asked in its thread, once all stages are ready."""
        assert self._scheduler is not None
        return self._scheduler.config.prefill_chunk or self._scheduler.config.max_auto_chunk

    # ---- the loop -------------------------------------------------------------------------------------

    def run(self) -> None:
        self._members.start(time.monotonic_ns())
        try:
            while not self._stopping:
                self._take_what_came()
                self._refill()
                self._hand_out()
                self._observe()
        except Exception as error:
            log.exception("the engine failed")
            self._give_up(Hopeless(f"internal error: {type(error).__name__}", usage=False))
        code = 0 if self._hopeless is None else EXIT_USAGE if self._hopeless.usage else EXIT_FAILED
        for stage in range(self._members.num_stages):
            self._control.send(stage, wire.Shutdown(code))
        self._control.close(_GOODBYE_S)
        self._answer_latecomers()

    def _answer_latecomers(self) -> None:
        """What was put into the inbox while the loop ended: refused, because `_stopping` is set."""
        while self._inbox:
            self._inbox.popleft()(time.monotonic())

    def _take_what_came(self) -> None:
        """Everything that happened since the last turn, in order."""
        came = self._control.poll(_TICK_S if not self._inbox else 0.0)
        self._woken_ns = time.monotonic_ns()
        for heard in came:
            now_ns = time.monotonic_ns()
            if isinstance(heard, Gone):
                events = self._members.gone(heard.stage, heard.cause, now_ns)
            else:
                events = self._members.heard(heard.stage, heard.arrived_ns, heard.message)
            self._happened(events)
        while self._inbox:
            self._inbox.popleft()(time.monotonic())
        self._happened(self._members.tick(time.monotonic_ns()))
        self._look_after_the_late(time.monotonic())

    def _happened(self, events: list[MemberEvent]) -> None:
        for event in events:
            match event:
                case StepDone(result):
                    self._step_done(result)
                case Formed():
                    self._formed(event)
                case EpochLost():
                    self._epoch_lost(event)
                case StageDied():
                    log.warning("stage %d died (%s)", event.stage, event.cause)
                    self._observer.stage_died(event.stage, event.cause)
                case Hopeless():
                    self._give_up(event)

    def _refill(self) -> None:
        """Puts steps into the pipeline while it has room."""
        scheduler = self._scheduler
        if scheduler is None or not self._members.formed:
            return
        now_s = time.monotonic()
        while (plan := scheduler.schedule(now_s)) is not None:
            frame = wire.encode(wire.Plan(plan))
            for stage in range(self._members.num_stages):
                self._control.send_frame(stage, frame)
            now_s = time.monotonic()
            owing = set(range(self._members.num_stages))
            was_full = scheduler.num_in_flight == scheduler.microbatches
            self._in_flight[plan.step_id] = _InFlight(plan, now_s, owing, was_full)
            self._observer.dispatched(plan, time.monotonic_ns(), self._woken_ns)

    def _observe(self) -> None:
        if self._scheduler is not None:
            self._observer.gauges(self._scheduler)

    def _hand_out(self) -> None:
        """One crossing to the event loop for all that this turn brought to all streams."""
        if self._outputs:
            outputs, self._outputs = self._outputs, {}
            self._loop.call_soon_threadsafe(_deliver, outputs)

    # ---- requests -------------------------------------------------------------------------------------

    def _admit(self, request: Request, sink: Sink, now_s: float) -> None:
        if self._stopping or self._scheduler is None:
            raise Draining("the server is shutting down")
        busy_s = self._observer.stage_busy_s
        opened = OpenRequest(request, sink, self.tokenizer, now_s, busy_s)
        if request.output.timings:
            opened.busy_at_arrival_s = busy_s()
        end = opened.resume(self._scheduler.config.eos_id, now_s)
        if end is not None:
            self._outputs.setdefault(sink, []).append(end)
            self._observer.output(opened, end, now_s)
            return
        self._scheduler.submit(request, now_s)
        self._open[request.id] = opened
        self._note_demand()

    def _abort(self, request_id: str, reason: FinishReason, now_s: float) -> None:
        if self._scheduler is not None and request_id in self._open:
            self._publish(self._scheduler.abort(request_id, reason), now_s)

    def _look_after_the_late(self, now_s: float) -> None:
        if self._scheduler is None:
            return
        self._publish(self._scheduler.expire(now_s), now_s)
        for step in self._in_flight.values():
            if now_s - step.sent_s > _STEP_DEADLINE_S:
                self._control.drop(min(step.owing), "stuck")
                break

    def _publish(self, events: list[SequenceEvent], now_s: float) -> None:
        """Turns what the scheduler says into what streams hear."""
        for event in events:
            opened = self._open.get(event.request_id)
            if opened is None:
                continue
            output = opened.output(event, now_s)
            if output.finish is FinishReason.STOP_STRING and event.finish is None:
                assert self._scheduler is not None
                self._scheduler.finish(event.sequence_id, FinishReason.STOP_STRING, now_s)
            self._outputs.setdefault(opened.sink, []).append(output)
            self._observer.output(opened, output, now_s)
            if opened.is_complete:
                del self._open[event.request_id]
        self._note_demand()

    def _note_demand(self) -> None:
        """The server has work while a request is open, or a step of one that just ended is under way."""
        self._observer.demand(bool(self._open or self._in_flight), time.monotonic_ns())

    # ---- the pipeline ---------------------------------------------------------------------------------

    def _step_done(self, result: StepResult) -> None:
        step = self._in_flight.get(result.step_id)
        if step is None or self._scheduler is None:
            return
        step.owing.discard(result.stage)
        self._observer.step_done(result, step.plan, time.monotonic_ns())
        if self._lanes is not None:
            lanes = self._lanes.observe(result.stage, result.stamps, step.was_full)
            self._scheduler.set_microbatches(lanes)
        if not step.owing:
            del self._in_flight[result.step_id]
            self._note_demand()
        if result.stage == self._members.num_stages - 1:
            now_s = time.monotonic()
            self._publish(self._scheduler.commit(result, now_s), now_s)

    def _formed(self, formed: Formed) -> None:
        log.info("epoch %d formed", formed.epoch)
        self._observer.formed(time.monotonic_ns())
        if self._scheduler is None:
            self._scheduler = self._make_scheduler(formed)
            self._tell(self.formed, None)
        else:
            # Everybody is replayed: what was in flight when the last epoch was lost never happened.
            now_s = time.monotonic()
            self._publish(self._scheduler.lose_stage(formed.epoch, now_s), now_s)

    def _epoch_lost(self, lost: EpochLost) -> None:
        """Nothing that is in flight will return; the scheduler hears of it when the next epoch forms."""
        log.warning("epoch %d lost: %s", lost.epoch, lost.cause)
        self._in_flight.clear()
        if self._lanes is not None:
            self._lanes.lost()
        self._observer.lost(time.monotonic_ns())

    def _give_up(self, hopeless: Hopeless) -> None:
        """Every open stream ends with a status; whoever runs the server learns why."""
        error = StagesLost("a pipeline stage was lost and does not come back")
        for opened in self._open.values():
            output = opened.fail(error)
            self._outputs.setdefault(opened.sink, []).append(output)
            self._observer.output(opened, output, time.monotonic())
        self._open.clear()
        self._stopping = True
        self._hopeless = hopeless
        self._hand_out()
        self._tell(self.failed, hopeless)

    # ---- crossings ------------------------------------------------------------------------------------

    def _call(self, call: Callable[[float], None]) -> None:
        self._inbox.append(call)
        if not self._stopping:
            self._control.wake()

    def _tell(self, future: asyncio.Future[T], outcome: T | PpserveError) -> None:
        """Settles a future of the event loop from this thread."""

        def settle() -> None:
            if future.done():
                return
            if isinstance(outcome, PpserveError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        self._loop.call_soon_threadsafe(settle)


def _deliver(outputs: dict[Sink, list[TokenOutput]]) -> None:
    for sink, news in outputs.items():
        sink.push(news)
