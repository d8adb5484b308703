"""A replica is restarted while others serve: its stage processes end and begin again, one after the other."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

from ppserve import wire
from ppserve.head.engine.control import ControlPlane
from ppserve.head.engine.member import StageState
from ppserve.head.engine.replica import Replica
from ppserve.process.environment import EXIT_RESTART

# A stage that has not ended by then is stuck in a step.
_ENDS_WITHIN_NS = 5_000_000_000


class RollingRestart:
    """done: when the replica has formed again. One process at a time, so that no more memory and cores are needed
    than while it serves."""

    def __init__(self, replica: Replica, control: ControlPlane, done: Future[None]) -> None:
        self.replica = replica
        self.done = done
        self._control = control
        self._ranks = deque(replica.members.ranks)
        self._current: int | None = None
        self._num_restarts = 0
        self._ends_by_ns = 0
        replica.members.held = True

    def tick(self, now_ns: int) -> bool:
        """Whether it is over."""
        members = self.replica.members
        if self._current is not None and not self._is_back(self._current, now_ns):
            return False
        self._current = None
        if self._ranks:
            self._begin(self._ranks.popleft(), now_ns)
            return False
        members.held = False
        if members.formed:
            self.done.set_result(None)
        return members.formed

    def _begin(self, rank: int, now_ns: int) -> None:
        member = self.replica.members[rank]
        self._current, self._num_restarts = rank, member.restarts
        if member.state is StageState.ABSENT:  # its process has ended by itself, and was counted
            self._num_restarts -= 1
            return
        self._ends_by_ns = now_ns + _ENDS_WITHIN_NS
        self.replica.members.restarting.add(rank)
        self._control.send(rank, wire.Shutdown(EXIT_RESTART))

    def cut_short(self) -> None:
        """The server is stopping: what is not restarted yet goes on as it is."""
        self._ranks.clear()

    def fail(self, error: Exception) -> None:
        self.replica.members.held = False
        self.done.set_exception(error)

    def _is_back(self, rank: int, now_ns: int) -> bool:
        """Whether the rank's next process has loaded its weights."""
        member = self.replica.members[rank]
        if member.restarts == self._num_restarts and now_ns > self._ends_by_ns:
            self._control.drop(rank, "restart")
        return member.restarts > self._num_restarts and member.state is StageState.LOADED
