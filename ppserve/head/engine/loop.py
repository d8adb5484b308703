"""The engine: one thread that handles all messages and keeps the pipelines full.

Ranks send messages. Other threads put calls into the inbox and wake the engine. It handles all in one thread, so
nothing needs a lock. It sleeps until something arrives, but for 40 ms at most: then it checks deadlines and silent
ranks.

Replicas share one request queue: what one replica cannot finish, another does. A replica that will not form again
ends alone, as long as another is left.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from ppserve import wire
from ppserve.config import ServeConfig
from ppserve.core.architecture import Split
from ppserve.core.request import FinishReason
from ppserve.core.scheduling.request_queue import RequestQueue
from ppserve.core.scheduling.sequence import SequenceEvent
from ppserve.errors import ConfigError, Draining, InvalidRequest, RequestError, StagesLost, UsageError, Violation
from ppserve.head.engine.background_masks import MaskThreads
from ppserve.head.engine.control import ControlPlane, Disconnected, Received
from ppserve.head.engine.members import Members
from ppserve.head.engine.placement import decide, difference
from ppserve.head.engine.replica import Replica, ReplicaReading, StepObserver
from ppserve.head.engine.streams import HandOver, OnOutput, OpenRequest, OpenStreams
from ppserve.process.identity import this_machine
from ppserve.process.lifetime import EXIT_FAILED, EXIT_USAGE

log = logging.getLogger("ppserve.engine")

T = TypeVar("T")

# It is shorter than the margin before a caller's deadline (`api.call`).
_TICK_S = 0.04
_MASKS_WITHIN_S = 0.005
"""A turn waits so long for masks that it asked for. Most take 50 us, and late ones miss a step."""
_GOODBYE_S = 5.0
_ANSWER_WITHIN_S = 5.0
_SHUTS_DOWN = "the server is shutting down"


def build_engine(
    config: ServeConfig,
    world_size: int,
    control: ControlPlane,
    hand_over: HandOver,
    on_output: OnOutput = lambda opened, output, now_s: None,
    step_observers: Sequence[StepObserver] = (),
) -> Engine:
    """Build an engine of the configured replicas. Its thread is not started."""
    grid = config.pipeline.grid(world_size)
    machine = this_machine()
    rules = partial(decide, config)

    def note_mask(seconds: float) -> None:
        for observer in step_observers:
            observer.on_mask(seconds)

    masks = MaskThreads(control.wake, note_mask)
    request_queue = RequestQueue(masks.source)
    members = [Members(grid, machine, rules, control, number) for number in range(grid.data)]
    replicas = [Replica(each, control, step_observers, time.monotonic_ns, request_queue) for each in members]
    return Engine(replicas, control, on_output, hand_over, masks=masks)


class Engine(threading.Thread):
    """The thread that drives the replicas and owns the open requests."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        control: ControlPlane,
        on_output: OnOutput,
        hand_over: HandOver,
        clock: Callable[[], int] = time.monotonic_ns,
        masks: MaskThreads | None = None,
    ) -> None:
        """replicas: all of them, by number; they share one request queue. clock: monotonic, in ns.
        masks: makes masks beside this thread; None if they are made in it."""
        super().__init__(name="engine", daemon=True)
        self.formed: Future[None] = Future()  # done when every replica has formed once
        self.failed: Future[UsageError | StagesLost] = Future()  # done when none will form again
        self.replicas = tuple(replicas)
        self.request_queue = replicas[0].request_queue
        self._living = list(replicas)
        self._replica_of = {rank: replica for replica in replicas for rank in replica.members.ranks}
        self._control = control
        self._clock = clock
        self._masks = masks
        # The calls of other threads, each with the future that gets its result.
        self._inbox: deque[tuple[Callable[[], object], Future[Any]]] = deque()
        self._streams = OpenStreams(on_output, hand_over)
        self._stopping = self._ended = False

    # ---- for other threads ----

    def submit(self, opened: OpenRequest) -> Future[None]:
        """Queue a request. The future is done when it is queued, or has a RequestError."""
        return self._call(lambda: self._queue_request(opened))

    def cancel(self, request_id: str) -> None:
        """End a request, if it has not ended."""
        abort = partial(self.request_queue.abort, request_id, FinishReason.CANCELLED)
        self._call(lambda: self._streams.add_events(abort(), self._now_s()))

    def snapshot(self) -> tuple[ReplicaReading, ...]:
        """Read every replica's state. Raise Draining if the engine does not answer."""
        try:
            return self._call(lambda: tuple(each.read() for each in self.replicas)).result(_ANSWER_WITHIN_S)
        except TimeoutError:
            raise Draining("the engine does not answer") from None

    def restart(self, replica: int, pauses: bool) -> Future[int]:
        """Restart a replica's stages. The future has the number of the epoch that ended.

        pauses: whether to do so even if no other replica serves, so that streams have to wait.
        """
        return self._call(lambda: self._restart_replica(replica, pauses))

    def reshape(self, replica: int, split: Split) -> Future[int]:
        """Divide a replica's layers anew: each of its ranks loads other layers, with or without other replicas.

        Streams go on. With fewer stages than ranks, the last ranks are not used. The future has the number of the
        first epoch with these layers, once it has formed. It has InvalidRequest for layers that do not fit the
        model, and ReshapeFailed where they cannot be loaded, or where there is no room for them or for one full
        sequence beside them: then the replica has its old layers, and streams go on with these.
        """
        reshaped: Future[int] = Future()
        reshaped.set_running_or_notify_cancel()

        def note_refusal(asked: Future[None]) -> None:
            if (error := asked.exception()) is not None:
                reshaped.set_exception(error)

        asked = self._call(lambda: self._reshape_replica(replica, split, reshaped))
        asked.add_done_callback(note_refusal)
        return reshaped

    def serves_after(self, replica: int, epoch: int) -> Future[bool]:
        """Return whether the replica serves again, in a later epoch. The future may have a RequestError."""
        return self._call(lambda: self._serves_after(replica, epoch))

    def drain(self) -> None:
        """Note that the server stops: streams may finish, and a lost stage must come back sooner."""
        for replica in self.replicas:
            self._call(replica.members.start_draining)

    def give_up(self, reason: UsageError | StagesLost) -> None:
        """End with this reason."""
        self._call(lambda: self._fail(reason))

    def stop(self) -> None:
        """Shut the stages down, in order, and end the thread."""
        self._stopping = True
        self._control.wake()

    @property
    def is_healthy(self) -> bool:
        """Whether a replica's stages are all there and answer."""
        now_ns = self._clock()
        return any(replica.members.is_healthy(now_ns) for replica in tuple(self._living))

    def _call(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._inbox.append((function, future))
        if self._ended:
            self._answer_calls()
        else:
            self._control.wake()
        return future

    # ---- the loop ----

    def run(self) -> None:
        try:
            while not self._stopping:
                self.turn()
            self._streams.fail_all(Draining(_SHUTS_DOWN), self._now_s())
        except Exception as error:
            log.exception("the engine failed")
            self._fail(StagesLost(f"internal error: {type(error).__name__}"))
        finally:
            self._shut_down_ranks()
            self._ended = True
            self._answer_calls()
            self._control.close(_GOODBYE_S)
            if self._masks is not None:
                self._masks.close()

    def turn(self) -> None:
        """Handle all messages, then fill the pipelines. It is public for simulations."""
        received = self._control.poll(_TICK_S if not self._inbox else 0.0)
        woken_ns = self._clock()
        for event in received:
            self._handle_rank(event)
        self._answer_calls()
        self._tick()
        self._note_demand()
        # Requests are admitted to all replicas before any of them plans, so that none takes another's share.
        self.request_queue.admit(self._now_s())
        self._take_masks()
        for replica in self._living:
            replica.refill(woken_ns)
        self._streams.publish(self._now_s())
        for replica in self.replicas:
            replica.report_load()
        self._streams.deliver()

    def _take_masks(self) -> None:
        """Get the masks of the next steps, and wait a moment for those that are asked for."""
        until_s = self._now_s() + _MASKS_WITHIN_S
        while True:
            for replica in self._living:
                self._streams.add_events(replica.take_masks(), self._now_s())
            if self._masks is None or not self._masks.wait(until_s - self._now_s()):
                return

    def _note_demand(self) -> None:
        # A request is open, or a step of an ended request is in flight.
        exists = len(self._streams) > 0 or any(len(replica.steps) > 0 for replica in self._living)
        for replica in self.replicas:
            replica.note_demand(exists)

    def _handle_rank(self, event: Received | Disconnected) -> None:
        replica = self._replica_of[event.rank]
        if replica in self._living:
            self._drive(replica, lambda: replica.handle_rank(event))
        elif isinstance(event, Received) and isinstance(event.message, wire.Hello):
            # This rank was away when its replica was told to exit.
            self._control.send((event.rank,), wire.Shutdown())

    def _answer_calls(self) -> None:
        """Make other threads' calls. Once the engine has ended, refuse them; then any thread may do this."""
        while self._inbox:
            try:
                function, future = self._inbox.popleft()
            except IndexError:  # another thread refused it
                return
            if not future.set_running_or_notify_cancel():
                continue  # its caller left
            try:
                if self._stopping:
                    raise Draining(_SHUTS_DOWN)
                future.set_result(function())
            except Exception as error:
                if not isinstance(error, RequestError):
                    log.exception("a call of the engine failed")
                future.set_exception(error)

    def _drive(self, replica: Replica, handle: Callable[[], list[SequenceEvent]]) -> None:
        """Let a replica handle something. If it will not form again, it ends."""
        try:
            self._streams.add_events(handle(), self._now_s())
        except (UsageError, StagesLost) as error:
            self._end_replica(replica, error)

    def _tick(self) -> None:
        """Check for silent ranks, overdue steps and passed deadlines."""
        for replica in tuple(self._living):
            self._drive(replica, replica.tick)
        if not self.formed.done() and all(replica.scheduler is not None for replica in self.replicas):
            self._begin_serving()
        self._streams.add_events(self.request_queue.expire(self._now_s()), self._now_s())

    # ---- requests ----

    def _queue_request(self, opened: OpenRequest) -> None:
        now_s = self._now_s()
        if (end := opened.begin(now_s, self._read_busy_s)) is not None:
            self._streams.add_output(opened, end, now_s)
            return
        if not self.formed.done():
            raise Draining("the server is not serving")
        self.request_queue.submit(opened.request, now_s, opened.token_filter, opened.text_rule)
        self._streams.open(opened)

    # ---- replicas ----

    def _begin_serving(self) -> None:
        """Begin to serve: every replica has formed. Fail if they would compute different tokens."""
        hellos = [hello for replica in self.replicas if (hello := replica.members.first.hello) is not None]
        for number, hello in enumerate(hellos):
            if found := difference(hellos[0], hello):
                self._fail(UsageError(f"replica {number} on {hello.host.name} has {found[1]}, unlike replica 0"))
                return
        decisions = filter(None, (replica.members.decision for replica in self.replicas))
        for layers in dict.fromkeys(decision.layers for decision in decisions):
            log.info("layers per stage: %s", layers)
        self.formed.set_result(None)

    def _end_replica(self, replica: Replica, reason: UsageError | StagesLost) -> None:
        """End a replica. Others compute its requests; without another one the engine ends."""
        if not self.formed.done() or self._living == [replica]:
            self._fail(reason)
            return
        log.error("replica %d has ended: %s", replica.number, reason)
        replica.members.end(reason)
        replica.lose_epoch()
        if replica.scheduler is not None:
            self.request_queue.remove_scheduler(replica.scheduler)
        self._living.remove(replica)
        self._control.send(replica.members.ranks, wire.Shutdown())

    def _find_replica(self, number: int) -> Replica:
        for replica in self._living:
            if replica.number == number:
                return replica
        raise InvalidRequest([Violation("replica", f"there is no replica {number}")])

    def _serves_after(self, number: int, epoch: int) -> bool:
        replica = self._find_replica(number)
        return replica.serves and replica.members.epoch > epoch

    def _restart_replica(self, number: int, pauses: bool) -> int:
        """Restart a replica's stages, and let others compute its requests. Return the number of the ended epoch.

        Raises InvalidRequest.
        """
        replica = self._find_replica(number)
        others = [other for other in self._living if other is not replica and other.serves]
        if not others and not pauses:
            problem = "no other replica serves: streams would have to wait for this one"
            raise InvalidRequest([Violation("pauses", problem)])
        log.info("replica %d is restarted", number)
        if others:
            replica.give_back()
        replica.members.restart()
        return replica.members.epoch

    def _reshape_replica(self, number: int, split: Split, formed: Future[int]) -> None:
        replica = self._find_replica(number)
        if not self.formed.done():
            raise Draining("the server is not serving")
        try:
            replica.reshape(split, formed)
        except ConfigError as error:
            raise InvalidRequest([Violation("layers", str(error))]) from None

    def _fail(self, reason: UsageError | StagesLost) -> None:
        """End every open stream with an error, and then the engine. `failed` gets the reason."""
        self._stopping = True
        if not self.failed.done():
            self.failed.set_result(reason)
        self._streams.fail_all(StagesLost("a pipeline stage was lost and does not come back"), self._now_s())

    def _shut_down_ranks(self) -> None:
        reason = self.failed.result() if self.failed.done() else None
        code = 0 if reason is None else EXIT_USAGE if isinstance(reason, UsageError) else EXIT_FAILED
        self._control.send(self._replica_of, wire.Shutdown(code))
        for replica in self.replicas:
            replica.members.end(reason or Draining(_SHUTS_DOWN))

    # ---- state ----

    def _read_busy_s(self) -> tuple[float, ...]:
        return tuple(seconds for replica in self.replicas for seconds in replica.busy_s())

    def _now_s(self) -> float:
        return self._clock() / 1e9
