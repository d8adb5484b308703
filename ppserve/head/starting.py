"""How long the head waits for ranks before the first epoch, and what it says meanwhile.

Downloads may take long, so what counts is the time in which nothing happened at any rank.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ppserve.core.figures import size
from ppserve.errors import StagesLost
from ppserve.head.engine.member import Member, StageState
from ppserve.head.engine.members import Members

log = logging.getLogger("ppserve.head")

TELL_EVERY_S = 30.0
_WHAT = {
    StageState.ABSENT: "has not come: is it started, with the same MASTER_ADDR, --control-port and --secret-file?",
    StageState.LOADING: "loads its weights",
    StageState.FORMING: "connects to its neighbours (--interface, --advertise)",
}


class WaitLimit:
    """Limits how long nothing may happen at the start, and tells the log what is missing."""

    def __init__(self, limit_s: float, now_s: float) -> None:
        self._limit_s = limit_s
        self._seen: object = None
        self._since_s = self._told_s = now_s

    def check(self, seen: object, missing: str, now_s: float) -> StagesLost | None:
        """Return why the server must end; None if it need not. seen: a value that changes when something
        happens."""
        if seen != self._seen:
            self._seen, self._since_s = seen, now_s
        waited_s = now_s - self._since_s
        if waited_s >= self._limit_s:
            since = f"nothing has happened for {waited_s:.0f} s (--start-timeout)"
            return StagesLost(f"{since}; waiting for {missing}")
        if now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            log.warning("waiting for %s", missing)
        return None


def find_missing(replicas: Sequence[Members]) -> tuple[object, str]:
    """Return what the ranks have done so far, to be compared, and in words what is missing."""
    members = [(replica.grid.name(member.rank), member) for replica in replicas for member in replica.all]
    missing = "; ".join(
        f"{name} (rank {member.rank}), which {_WHAT[member.state]}{_amount(member)}"
        for name, member in members
        if member.state in _WHAT
    )
    return [(member.state, member.progress) for _, member in members], missing or "the epoch to form"


def _amount(member: Member) -> str:
    done, total = member.progress
    return f", {size(done)} of {size(total)}" if member.state is StageState.LOADING and total else ""
