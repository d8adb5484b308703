"""How long the head waits for ranks before the first epoch, and what it says meanwhile.

Downloads may take long, so what counts is the time in which nothing happened at any rank.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ppserve.core.figures import size_text
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
_COMES_HERE = "imports its libraries and, at the first start, compiles kernels (kept in ~/.cache/ppserve)"
"""What a rank does on the head's own host before it comes: this server has started it."""


def describe_start(replicas: Sequence[Members], doing: str, num_here: int, records_graphs: bool = False) -> str:
    """Say how many ranks are at which step of the start, in the order of the steps.

    doing: what the stage of rank 0 does before it connects to the head, in words. num_here: how many ranks, from
    rank 0 on, this host has started; they do about the same. records_graphs: whether ranks with a GPU do so when
    they join.
    """
    members = [member for replica in replicas for member in replica.all]
    of = {state: [member for member in members if member.state is state] for state in StageState}
    parts = []
    if here := [member for member in of[StageState.ABSENT] if member.rank < num_here]:
        parts.append((len(here), doing if here[0].rank == 0 else "preparing"))
    if away := [member for member in of[StageState.ABSENT] if member.rank >= num_here]:
        parts.append((len(away), "not here yet"))
    if loading := of[StageState.LOADING]:
        done, total = (sum(member.progress[part] for member in loading) for part in (0, 1))
        read = f" {size_text(done)} of {size_text(total)}" if total > done else ""
        parts.append((len(loading), "testing kernels" if 0 < total <= done else f"loading{read}"))
    if loaded := of[StageState.LOADED] + of[StageState.FORMING]:
        has_gpu = any(member.hello is not None and member.hello.device.gpu is not None for member in loaded)
        parts.append((len(loaded), "joining" + (", recording graphs" if records_graphs and has_gpu else "")))
    # As long as all do the same, their number says nothing.
    said = [what if count == len(members) else f"{count} of {len(members)} {what}" for count, what in parts]
    return "; ".join(said) or "ready"


class WaitLimit:
    """Limits how long nothing may happen at the start, and tells the log what is missing meanwhile."""

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
        if now_s - max(self._told_s, self._since_s) >= TELL_EVERY_S:
            self._told_s = now_s
            log.warning("waiting for %s", missing)
        return None


def find_missing(replicas: Sequence[Members], num_here: int) -> tuple[object, str]:
    """Return what the ranks have done so far, to be compared, and in words what is missing.

    num_here: how many ranks, from rank 0 on, this host has started. Those that have not come are at work here.
    """
    members = [(replica.grid.name(member.rank), member) for replica in replicas for member in replica.all]
    missing = "; ".join(
        f"{name} (rank {member.rank}), which {_what(member, num_here)}"
        for name, member in members
        if member.state in _WHAT
    )
    return [(member.state, member.progress) for _, member in members], missing or "the epoch to form"


def _what(member: Member, num_here: int) -> str:
    if member.state is StageState.ABSENT and member.rank < num_here:
        return _COMES_HERE
    done, total = member.progress
    is_counted = member.state is StageState.LOADING and total
    return _WHAT[member.state] + (f", {size_text(done)} of {size_text(total)}" if is_counted else "")
