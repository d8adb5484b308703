"""A replica is restarted while others serve: its stage processes end and begin again, one after the other."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

from ppserve.head.engine.member import Member, StageState
from ppserve.head.engine.members import Members


class RollingRestart:
    """The restart of one replica's processes, one at a time: no more memory and cores are needed than to serve."""

    def __init__(self, members: Members, done: Future[None]) -> None:
        """done: when the replica has formed again."""
        self.members = members
        self._done = done
        self._ranks = deque(members.ranks)
        self._awaited: tuple[int, int] | None = None  # a rank, and its number of restarts when it is back
        members.hold_epochs(True)

    def tick(self, now_ns: int) -> bool:
        """Restarts the next process when the last one is back. Returns whether the replica has formed again."""
        if self._awaited is not None:
            rank, restarts = self._awaited
            member = self.members[rank]
            if member.restarts < restarts or member.state is not StageState.LOADED:
                return False
            self._awaited = None
        if self._ranks:
            self._restart(self.members[self._ranks.popleft()], now_ns)
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

    def _restart(self, member: Member, now_ns: int) -> None:
        if member.state is StageState.ABSENT:  # its process has ended by itself, and was counted
            self._awaited = member.rank, member.restarts
            return
        self._awaited = member.rank, member.restarts + 1
        self.members.restart_rank(member.rank, now_ns)
