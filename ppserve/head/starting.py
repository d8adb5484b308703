"""How long the head waits for ranks while the pipeline forms for the first time, and what the log says meanwhile.

A rank may take long to download its weights, so what counts is the time in which nothing happened at any rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ppserve.core.figures import size
from ppserve.head.engine.member import FatalError, Member, StageState
from ppserve.head.engine.members import Members

log = logging.getLogger("ppserve.head")

TELL_EVERY_S = 30.0


class WaitLimit:
    """The time in which something must happen, and when the log names what is missing."""

    def __init__(self, limit_s: float, now_s: float) -> None:
        """limit_s: of `--start-timeout`."""
        self._limit_s = limit_s
        self._seen: object = None
        self._since_s = self._told_s = now_s

    def check(self, seen: object, missing: Callable[[], str], now_s: float) -> FatalError | None:
        """Why the server must end; None while it may wait. seen: changes when something happens."""
        if seen != self._seen:
            self._seen, self._since_s = seen, now_s
        waited_s = now_s - self._since_s
        if waited_s >= self._limit_s:
            reason = f"nothing has happened for {waited_s:.0f} s (--start-timeout); waiting for {missing()}"
            return FatalError(reason, usage=False)
        if now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            log.warning("waiting for %s", missing())
        return None


def missing_ranks(ranks: Sequence[int]) -> str:
    """What the server waits for while these ranks have not said Hello, for `--parallel auto`."""
    names = ", ".join(f"rank {rank}" for rank in ranks)
    return f"{names}, which {_WHAT[StageState.ABSENT]} Or it measures still (--parallel auto)"


class StartWatch:
    """A watch over the ranks of all replicas until they have formed."""

    def __init__(self, replicas: Sequence[Members], limit_s: float, now_s: float) -> None:
        self._replicas, self._limit = replicas, WaitLimit(limit_s, now_s)

    def check(self, now_s: float) -> FatalError | None:
        """Why the server must end; None while it may wait."""
        seen = [(member.state, member.progress) for replica in self._replicas for member in replica.all]
        return self._limit.check(seen, self._missing, now_s)

    def _missing(self) -> str:
        waits = [(r, m) for r in self._replicas for m in r.all if m.state in _WHAT]
        told = [f"{r.grid.name(m.rank)} (rank {m.rank}), which {_what(m)}" for r, m in waits]
        return "; ".join(told) or "the epoch to form"


def _what(member: Member) -> str:
    done, total = member.progress
    amount = f", {size(done)} of {size(total)}" if member.state is StageState.LOADING and total else ""
    return _WHAT[member.state] + amount


_WHAT = {
    StageState.ABSENT: "has not come: is it started, with the same MASTER_ADDR, --control-port and --secret-file?",
    StageState.LOADING: "loads its weights",
    StageState.FORMING: "connects to its neighbours (--interface, --advertise)",
}
