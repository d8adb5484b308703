"""All replicas behind one head: what one of them cannot go on with, another does.

Messages of ranks go to the replica that the rank belongs to, requests to the request queue that all replicas
share. A replica that will not form again ends alone, as long as another is left. Everything runs in the engine's
thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from ppserve import wire
from ppserve.core.request import FinishReason, Request
from ppserve.core.scheduling.sequence import SequenceEvent
from ppserve.errors import Draining, InvalidRequest, RequestFailed, Violation
from ppserve.head.engine.control import ControlPlane, Disconnected, Received
from ppserve.head.engine.member import FatalError, Formed
from ppserve.head.engine.placement import difference_in_words, first_difference
from ppserve.head.engine.reading import ReplicaReading
from ppserve.head.engine.replica import Replica, ReplicaEvent
from ppserve.head.engine.rolling import RollingRestart

log = logging.getLogger("ppserve.engine")


class Fleet:
    """See the module. clock: monotonic, in nanoseconds."""

    def __init__(self, replicas: Sequence[Replica], control: ControlPlane, clock: Callable[[], int]) -> None:
        """replicas: in order of their numbers, with one request queue."""
        self.replicas = tuple(replicas)
        self.request_queue = replicas[0].request_queue
        self._living = list(replicas)
        self._control = control
        self._clock = clock
        self._of_rank = {rank: replica for replica in replicas for rank in replica.members.ranks}
        self._has_formed = False
        self._restart: RollingRestart | None = None

    # ---- requests -------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError: Draining until every replica has formed."""
        if not self._has_formed:
            raise Draining("the server is not serving")
        self.request_queue.submit(request, self._now_s())

    def abort(self, request_id: str, reason: FinishReason) -> list[SequenceEvent]:
        """End a request now. Returns the terminal events of its sequences."""
        return self.request_queue.abort(request_id, reason)

    def finish(self, sequence_id: int, reason: FinishReason) -> None:
        """End a sequence because of its text (a stop string): no event, no further step."""
        self.request_queue.finish(sequence_id, reason)

    def demand(self, exists: bool) -> bool:
        """Whether the server has work: a request is open, or a step of a request that has ended is in flight."""
        has_work = exists or any(replica.has_steps for replica in self._living)
        for replica in self.replicas:
            replica.demand(has_work)
        return has_work

    # ---- events ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """The engine has started: ranks may connect."""
        for replica in self.replicas:
            replica.start()

    def take(self, heard: Received | Disconnected) -> list[ReplicaEvent]:
        """A rank sent a message, or its connection ended."""
        replica = self._of_rank[heard.rank]
        if replica in self._living:
            return self._sift(replica, replica.take(heard))
        if isinstance(heard, Received) and isinstance(heard.message, wire.Hello):
            # It was away when the others of its replica were told to end.
            self._control.send(heard.rank, wire.Shutdown())
        return []

    def tick(self) -> list[ReplicaEvent]:
        """Checks what no message reports: silent ranks, overdue steps, passed deadlines of requests."""
        events = [event for replica in tuple(self._living) for event in self._sift(replica, replica.tick())]
        if self._restart is not None and self._restart.tick(self._clock()):
            log.info("replica %d was restarted", self._restart.replica.number)
            self._restart = None
        return [*events, *self.request_queue.expire(self._now_s())]

    def refill(self, woken_ns: int) -> None:
        """Sends steps while slots are free and sequences are ready. woken_ns: when the engine's turn began."""
        # First: a replica that is refilled early gets its share too, and tells of steps that made way for it.
        self.request_queue.admit(self._now_s())
        for replica in self._living:
            replica.refill(woken_ns)

    def report_load(self) -> None:
        for replica in self.replicas:
            replica.report_load()

    def drain(self) -> None:
        """The server is stopping: a lost stage must come back sooner than usual."""
        for replica in self.replicas:
            replica.members.draining = True
        if self._restart is not None:
            self._restart.cut_short()

    def restart(self, number: int, pauses: bool, done: Future[None]) -> None:
        """Other replicas go on with the requests of this one, and then its stage processes are restarted.

        pauses: also if there is none, so that its streams wait for it. done: when it serves again, or with a
        RequestError when it does not come back. Raises RequestError if it is refused.
        """
        if self._restart is not None:
            raise _refused("replica", f"replica {self._restart.replica.number} is being restarted")
        replica = next((replica for replica in self._living if replica.number == number), None)
        if replica is None:
            raise _refused("replica", f"there is no replica {number}")
        others = [other for other in self._living if other is not replica and other.serves]
        if not others and not pauses:
            raise _refused("pauses", "no other replica serves: streams would have to wait for this one")
        log.info("replica %d is restarted", number)
        if others:
            replica.give_back()
        self._restart = RollingRestart(replica, self._control, done)

    def shut_down(self, code: int) -> None:
        """Tells every rank to end. code: its exit code."""
        if self._restart is not None:
            self._restart.fail(Draining("the server is shutting down"))
        for rank in self._of_rank:
            self._control.send(rank, wire.Shutdown(code))

    def _sift(self, replica: Replica, events: list[ReplicaEvent]) -> list[ReplicaEvent]:
        """Formed when the last replica has formed for the first time; FatalError when no other replica is left."""
        passed: list[ReplicaEvent] = []
        for event in events:
            if isinstance(event, Formed):
                if any(other.scheduler is None for other in self.replicas):
                    continue
                if mistake := self._what_differs():
                    passed.append(FatalError(mistake, usage=True))
                    continue
                self._has_formed = True
            elif isinstance(event, FatalError) and self._has_formed and self._living != [replica]:
                self._end(replica, event)
                continue
            passed.append(event)
        return passed

    def _what_differs(self) -> str | None:
        """Whether a replica on other hosts found something else to serve, in words."""
        hellos = [hello for replica in self.replicas if (hello := replica.members.first.hello) is not None]
        for number, hello in enumerate(hellos):
            if name := first_difference(hellos[0], hello):
                return f"replica {number} on {hello.host} has {difference_in_words(name)} than replica 0"
        return None

    def _end(self, replica: Replica, fatal: FatalError) -> None:
        if replica not in self._living:
            return
        log.error("replica %d is gone for good: %s", replica.number, fatal.reason)
        if self._restart is not None and self._restart.replica is replica:
            self._restart.fail(RequestFailed(fatal.reason))
            self._restart = None
        replica.give_back()
        if replica.scheduler is not None:
            self.request_queue.leave(replica.scheduler)
        self._living.remove(replica)
        self._control.broadcast(replica.members.ranks, wire.Shutdown())

    # ---- state ----------------------------------------------------------------------------------------

    def is_healthy(self, now_ns: int) -> bool:
        """Whether a replica serves. Safe in any thread."""
        return any(replica.members.healthy(now_ns) for replica in tuple(self._living))

    def busy_s(self) -> tuple[float, ...]:
        """Settled seconds of computation of every stage, replica by replica."""
        return tuple(seconds for replica in self.replicas for seconds in replica.busy_s())

    def readings(self) -> tuple[ReplicaReading, ...]:
        """Every replica now. Raises Draining until every one has formed."""
        now_ns = self._clock()
        return tuple(replica.reading(now_ns) for replica in self.replicas)

    def prove_idle(self) -> None:
        """Without requests and steps, no KV block may be held. Raises AssertionError."""
        for replica in self.replicas:
            replica.prove_idle()

    def _now_s(self) -> float:
        return self._clock() / 1e9


def _refused(field: str, problem: str) -> InvalidRequest:
    return InvalidRequest([Violation(field, problem)])
