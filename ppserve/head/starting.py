"""How long the head waits for ranks before the first epoch, and what it says meanwhile.

Downloads may take long, so what counts is the time in which nothing happened at any rank.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from typing import TextIO

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


_COMES_HERE = "imports its libraries and, at the first start, compiles kernels (kept in ~/.cache/ppserve)"
"""What a rank does on the head's own host before it comes: this server has started it."""


class StartLine:
    """The line on a terminal that says what the ranks do at the start, and for how long they have."""

    def __init__(self, stream: TextIO, now_s: float) -> None:
        """stream: nothing is shown unless it is a terminal."""
        self._stream, self._since_s = stream, now_s
        self._is_terminal = stream.isatty()

    def show(self, text: str, now_s: float) -> None:
        """Write over the line. A line of the log takes its place (`ERASE_LINE` of `ppserve.process.log`)."""
        if self._is_terminal:
            line = f"starting, {now_s - self._since_s:.0f} s: {text}"
            self._stream.write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}\r")
            self._stream.flush()

    def erase(self) -> None:
        if self._is_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def describe_start(replicas: Sequence[Members]) -> str:
    """Say how many ranks are at which step of the start, in the order of the steps."""
    members = [member for replica in replicas for member in replica.all]
    of = {state: [member for member in members if member.state is state] for state in StageState}
    parts = []
    if absent := of[StageState.ABSENT]:
        first = "first start: into ~/.cache/ppserve"
        parts.append(f"{len(absent)} of {len(members)} import, compile ({first})")
    if loading := of[StageState.LOADING]:
        done, total = (sum(member.progress[part] for member in loading) for part in (0, 1))
        is_read = 0 < total <= done
        what = "prepare their kernels" if is_read else "load weights"
        parts.append(f"{len(loading)} {what}" + (f", {size(done)} of {size(total)}" if total > done else ""))
    if loaded := of[StageState.LOADED] + of[StageState.FORMING]:
        parts.append(f"{len(loaded)} join the pipeline")
    return "; ".join(parts) or "the pipeline is ready"


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


def find_missing(replicas: Sequence[Members], is_one_host: bool = False) -> tuple[object, str]:
    """Return what the ranks have done so far, to be compared, and in words what is missing.

    is_one_host: this host has all ranks, so those that have not come are at work here.
    """
    what = {**_WHAT, StageState.ABSENT: _COMES_HERE} if is_one_host else _WHAT
    members = [(replica.grid.name(member.rank), member) for replica in replicas for member in replica.all]
    missing = "; ".join(
        f"{name} (rank {member.rank}), which {what[member.state]}{_amount(member)}"
        for name, member in members
        if member.state in _WHAT
    )
    return [(member.state, member.progress) for _, member in members], missing or "the epoch to form"


def _amount(member: Member) -> str:
    done, total = member.progress
    return f", {size(done)} of {size(total)}" if member.state is StageState.LOADING and total else ""
