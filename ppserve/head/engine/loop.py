"""The engine: one thread that handles all messages and keeps the pipelines full.

Requests, cancellations, results of stages and the end of a stage's connection are messages. Other threads put
theirs into the inbox and wake the engine; all are handled in this thread, so nothing needs a lock. The engine
sleeps until a message arrives, at most 0.1 s: deadlines and silent ranks are checked that often.

Several replicas share one request queue, which decides which of them computes a request. What one of them cannot
finish, another does. A replica that will not form again ends alone, as long as another is left.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from ppserve import wire
from ppserve.core.request import FinishReason, Request
from ppserve.core.scheduling.sequence import SequenceEvent
from ppserve.errors import Draining, InvalidRequest, RequestError, RequestFailed, StagesLost, Violation
from ppserve.head.engine.control import ControlPlane, Disconnected, Received
from ppserve.head.engine.member import FatalError, Formed
from ppserve.head.engine.messages import Abort, Drain, Message, Restart, Snapshot, Stop, Submit
from ppserve.head.engine.observer import Observers
from ppserve.head.engine.open_request import HeldAnswer, OpenRequest
from ppserve.head.engine.output import Sink
from ppserve.head.engine.placement import difference_in_words, first_difference
from ppserve.head.engine.reading import ReplicaReading
from ppserve.head.engine.replica import Replica, ReplicaEvent
from ppserve.head.engine.rolling import RollingRestart
from ppserve.head.engine.streams import HandOver, OpenStreams
from ppserve.process.environment import EXIT_FAILED, EXIT_USAGE
from ppserve.tokenizer import Tokenizer

log = logging.getLogger("ppserve.engine")

_TICK_S = 0.1
_GOODBYE_S = 5.0
_ANSWER_WITHIN_S = 5.0


class Engine(threading.Thread):
    """The thread that drives the replicas and owns the open requests."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        control: ControlPlane,
        observers: Observers,
        hand_over: HandOver,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """replicas: in order of their numbers, with one request queue. clock: monotonic, in nanoseconds."""
        super().__init__(name="engine", daemon=True)
        self.formed: Future[None] = Future()
        """Done when every replica has formed for the first time."""
        self.failed: Future[FatalError] = Future()
        """Done when no replica will form again."""
        self.replicas = tuple(replicas)
        self.request_queue = replicas[0].request_queue
        self._living = list(replicas)
        self._replica_of = {rank: replica for replica in replicas for rank in replica.members.ranks}
        self._control = control
        self._observers = observers
        self._clock = clock
        self._inbox: deque[Message] = deque()
        self._streams = OpenStreams(self.request_queue, observers, hand_over)
        self._rolling: RollingRestart | None = None
        self._has_formed = self._stopping = self._ended = self._is_unbalanced = False

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

    def is_healthy(self, now_ns: int) -> bool:
        """Whether a replica serves."""
        return any(replica.members.is_healthy(now_ns) for replica in tuple(self._living))

    def _post(self, message: Message) -> None:
        self._inbox.append(message)
        if self._ended:
            self._refuse_the_rest()
        else:
            self._control.wake()

    # ---- the loop -------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self.begin()
            while not self._stopping:
                self.turn()
        except Exception as error:
            log.exception("the engine failed")
            self._fail(FatalError(f"internal error: {type(error).__name__}", usage=False))
        self._streams.fail_all(_shutting_down(), self._now_s())
        self._shut_down_ranks()
        self._ended = True
        self._refuse_the_rest()
        self._control.close(_GOODBYE_S)

    def begin(self) -> None:
        """Ranks may connect from now on."""
        for replica in self.replicas:
            replica.start()

    def turn(self) -> None:
        """Handles all messages since the last turn, then fills the pipelines. Public for simulated worlds."""
        received = self._control.poll(_TICK_S if not self._inbox else 0.0)
        woken_ns = self._clock()
        for event in received:
            self._handle_rank(event)
        while self._inbox and not self._stopping:
            self._handle_message(self._inbox.popleft())
        self._tick()
        self._note_demand()
        # For all replicas first: one that is refilled early gets its share too.
        self.request_queue.admit(self._now_s())
        for replica in self._living:
            replica.refill(woken_ns)
        self._streams.publish(self._now_s())
        for replica in self.replicas:
            replica.report_load()
        self._streams.deliver()

    def _handle_rank(self, event: Received | Disconnected) -> None:
        replica = self._replica_of[event.rank]
        if replica in self._living:
            self._handle_events(replica, replica.handle_rank(event))
        elif isinstance(event, Received) and isinstance(event.message, wire.Hello):
            # It was away when the others of its replica were told to exit.
            self._control.send(event.rank, wire.Shutdown())

    def _handle_message(self, message: Message) -> None:
        match message:
            case Submit():
                self._handle_submit(message)
            case Abort(request_id, reason):
                if request_id in self._streams:
                    self._streams.add_events(self.request_queue.abort(request_id, reason), self._now_s())
            case Snapshot(readings):
                _settle(readings, self._read_replicas)
            case Restart(number, pauses, done):
                if done.set_running_or_notify_cancel():
                    self._handle_restart(number, pauses, done)
            case Drain():
                for replica in self.replicas:
                    replica.members.start_draining()
                if self._rolling is not None:
                    self._rolling.cut_short()
            case Stop():
                self._stopping = True
            case FatalError():
                self._fail(message)

    def _handle_events(self, replica: Replica, events: Iterable[ReplicaEvent]) -> None:
        for event in events:
            match event:
                case SequenceEvent():
                    self._streams.add_events([event], self._now_s())
                case Formed():
                    self._note_formed()
                case FatalError():
                    self._end_replica(replica, event)

    def _tick(self) -> None:
        """Checks what no message reports: silent ranks, overdue steps, passed deadlines of requests."""
        for replica in tuple(self._living):
            self._handle_events(replica, replica.tick())
        if self._rolling is not None and self._rolling.tick(self._clock()):
            log.info("replica %d was restarted", self._rolling.members.replica)
            self._rolling = None
        self._streams.add_events(self.request_queue.expire(self._now_s()), self._now_s())

    # ---- requests -------------------------------------------------------------------------------------

    def _handle_submit(self, asked: Submit) -> None:
        if not asked.accepted.set_running_or_notify_cancel():
            return  # its caller left before the request was queued
        try:
            self._queue_request(asked)
        except RequestError as error:
            self._note_refusal(error)
            asked.accepted.set_exception(error)
        except Exception as error:
            log.exception("request %s could not be queued", asked.request.id)
            asked.accepted.set_exception(error)
        else:
            asked.accepted.set_result(None)

    def _queue_request(self, asked: Submit) -> None:
        """Raises RequestError."""
        now_s = self._now_s()
        opened = OpenRequest(asked.request, asked.sink, asked.tokenizer, now_s, self._read_busy_s)
        if asked.held is not None and (end := opened.resume(asked.held, now_s)) is not None:
            self._streams.add_output(opened, end, now_s)
            return
        if not self._has_formed:
            raise Draining("the server is not serving")
        self.request_queue.submit(asked.request, now_s)
        self._streams.open(opened)

    def _note_refusal(self, error: RequestError) -> None:
        for observer in self._observers:
            observer.on_refused(error)

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

    def _note_demand(self) -> None:
        """The server has work while a request is open, or a step of a request that has ended is in flight."""
        has_work = len(self._streams) > 0 or any(replica.has_steps for replica in self._living)
        for replica in self.replicas:
            replica.note_demand(has_work)
        if has_work or self._is_unbalanced:
            return
        try:
            for replica in self.replicas:
                replica.prove_idle()
        except AssertionError:
            self._is_unbalanced = True  # it stays so: once in the log is enough
            log.exception("KV blocks are not balanced")

    # ---- replicas -------------------------------------------------------------------------------------

    def _note_formed(self) -> None:
        """Serves once every replica has formed, if all of them compute the same."""
        if any(replica.scheduler is None for replica in self.replicas):
            return
        hellos = [hello for replica in self.replicas if (hello := replica.members.first.hello) is not None]
        for number, hello in enumerate(hellos):
            if name := first_difference(hellos[0], hello):
                mistake = f"replica {number} on {hello.host} has {difference_in_words(name)} than replica 0"
                self._fail(FatalError(mistake, usage=True))
                return
        self._has_formed = True
        self.formed.set_result(None)

    def _end_replica(self, replica: Replica, fatal: FatalError) -> None:
        """Its requests are computed by others; without another, the engine ends."""
        if not self._has_formed or self._living == [replica]:
            self._fail(fatal)
            return
        if replica not in self._living:
            return
        log.error("replica %d has ended: %s", replica.number, fatal.reason)
        if self._rolling is not None and self._rolling.members is replica.members:
            self._rolling.fail(RequestFailed(fatal.reason))
            self._rolling = None
        replica.give_back()
        if replica.scheduler is not None:
            self.request_queue.leave(replica.scheduler)
        self._living.remove(replica)
        self._control.broadcast(replica.members.ranks, wire.Shutdown())

    def _handle_restart(self, number: int, pauses: bool, done: Future[None]) -> None:
        """Other replicas compute the requests of this one, and then its stage processes are restarted."""
        replica = next((replica for replica in self._living if replica.number == number), None)
        others = [other for other in self._living if other is not replica and other.serves]
        if self._rolling is not None:
            problem = f"replica {self._rolling.members.replica} is being restarted"
            done.set_exception(_refused("replica", problem))
        elif replica is None:
            done.set_exception(_refused("replica", f"there is no replica {number}"))
        elif not others and not pauses:
            problem = "no other replica serves: streams would have to wait for this one"
            done.set_exception(_refused("pauses", problem))
        else:
            log.info("replica %d is restarted", number)
            if others:
                replica.give_back()
            self._rolling = RollingRestart(replica.members, done)

    def _fail(self, fatal: FatalError) -> None:
        """Ends every open stream with a status. `failed` has the reason."""
        self._stopping = True
        self._streams.fail_all(StagesLost("a pipeline stage was lost and does not come back"), self._now_s())
        if not self.failed.done():
            self.failed.set_result(fatal)

    def _shut_down_ranks(self) -> None:
        if self._rolling is not None:
            self._rolling.fail(_shutting_down())
        fatal = self.failed.result() if self.failed.done() else None
        code = 0 if fatal is None else EXIT_USAGE if fatal.usage else EXIT_FAILED
        for rank in self._replica_of:
            self._control.send(rank, wire.Shutdown(code))

    # ---- state ----------------------------------------------------------------------------------------

    def _read_replicas(self) -> tuple[ReplicaReading, ...]:
        """Raises Draining until every replica has formed."""
        now_ns = self._clock()
        return tuple(replica.read(now_ns) for replica in self.replicas)

    def _read_busy_s(self) -> tuple[float, ...]:
        """Settled seconds of computation of every stage, replica by replica."""
        return tuple(seconds for replica in self.replicas for seconds in replica.busy_s())

    def _now_s(self) -> float:
        return self._clock() / 1e9


def _shutting_down() -> Draining:
    return Draining("the server is shutting down")


def _refused(field: str, problem: str) -> InvalidRequest:
    return InvalidRequest([Violation(field, problem)])


def _settle(future: Future[tuple[ReplicaReading, ...]], answer: Callable[[], tuple[ReplicaReading, ...]]) -> None:
    try:
        future.set_result(answer())
    except Exception as error:
        future.set_exception(error)
