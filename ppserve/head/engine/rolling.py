"""A replica is restarted while others serve: its stage processes end and begin again, one after the other."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

from ppserve.head.engine.member import StageState
from ppserve.head.engine.members import Members


class RollingRestart:
    """The restart of one replica's processes, one at a time: no more memory and cores are needed than to serve."""

    def __init__(self, members: Members, done: Future[None]) -> None:
        """done: when the replica has formed again."""
        self.members = members
        self._done = done
        self._ranks = deque(members.ranks)
        self._current: int | None = None
        self._num_restarts = 0
        members.hold_epochs(True)

    def tick(self, now_ns: int) -> bool:
        """Restarts the next process when the last one is back. Returns whether the replica has formed again."""
        if self._current is not None and not self._is_back(self._current):
            return False
        self._current = None
        if self._ranks:
            self._restart(self._ranks.popleft(), now_ns)
            return False
        self.members.hold_epochs(False)
        if self.members.formed:
            self._done.set_result(None)
        return self.members.formed

    def cut_short(self) -> None:
        """The server is stopping: processes that are not restarted yet stay as they are."""
        self._ranks.clear()

    def fail(self, error: Exception) -> None:
        self.members.hold_epochs(False)
        self._done.set_exception(error)

    def _restart(self, rank: int, now_ns: int) -> None:
        member = self.members[rank]
        self._current, self._num_restarts = rank, member.restarts
        if member.state is StageState.ABSENT:  # its process has ended by itself, and was counted
            self._num_restarts -= 1
            return
        self.members.restart_rank(rank, now_ns)

    def _is_back(self, rank: int) -> bool:
        """Whether the rank's next process has loaded its weights."""
        member = self.members[rank]
        return member.restarts > self._num_restarts and member.state is StageState.LOADED
