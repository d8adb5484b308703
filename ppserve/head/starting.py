"""How long the head waits for ranks while the pipeline forms for the first time, and what it says meanwhile.

A rank may take long to download its weights, so what counts is the time in which nothing happened at any rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from ppserve import wire
from ppserve.core.figures import size
from ppserve.head.engine.control import Disconnected, Received, SocketControlPlane
from ppserve.head.engine.member import FatalError, Member, StageState
from ppserve.head.engine.members import Members

log = logging.getLogger("ppserve.head")

TELL_EVERY_S = 30.0
_POLL_S = 0.1
_PING_EVERY_S = 0.5
_WHAT = {
    StageState.ABSENT: "has not come: is it started, with the same MASTER_ADDR, --control-port and --secret-file?",
    StageState.LOADING: "loads its weights",
    StageState.FORMING: "connects to its neighbours (--interface, --advertise)",
}


class WaitLimit:
    """The time in which something must happen, and when the log names what is missing."""

    def __init__(self, limit_s: float, now_s: float) -> None:
        """limit_s: of `--start-timeout`."""
        self._limit_s = limit_s
        self._seen: object = None
        self._since_s = self._told_s = now_s

    def check(self, seen: object, missing: str, now_s: float) -> FatalError | None:
        """Why the server must end; None while it may wait. seen: changes when something happens."""
        if seen != self._seen:
            self._seen, self._since_s = seen, now_s
        waited_s = now_s - self._since_s
        if waited_s >= self._limit_s:
            reason = f"nothing has happened for {waited_s:.0f} s (--start-timeout); waiting for {missing}"
            return FatalError(reason, usage=False)
        if now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            log.warning("waiting for %s", missing)
        return None


def find_missing(replicas: Sequence[Members]) -> tuple[object, str]:
    """What the ranks have done so far, and what is still missing, in words."""
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


def wait_for_hellos(
    control: SocketControlPlane,
    world_size: int,
    limit: WaitLimit,
    is_stopping: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[wire.Hello, ...] | FatalError:
    """The Hello of every rank, in the order of ranks; empty where a rank cannot serve or the server is stopping.

    All messages are put back for the engine as if they arrived at the end of this wait: otherwise the wait would
    count as a rank's silence. clock: monotonic, in seconds.
    """
    hellos: dict[int, wire.Hello] = {}
    failures: list[tuple[int, wire.FromStage]] = []
    fatal: FatalError | None = None
    now_s = pinged_s = clock()
    while len(hellos) < world_size and not failures and not is_stopping() and fatal is None:
        if now_s - pinged_s > _PING_EVERY_S:
            pinged_s = now_s
            control.broadcast(hellos, wire.Ping(round(now_s * 1e9)))  # a stage that receives nothing ends itself
        for event in control.poll(_POLL_S):
            match event:
                case Disconnected(rank):
                    hellos.pop(rank, None)
                case Received(rank, _, wire.Hello() as hello):
                    hellos[rank] = hello
                case Received(rank, _, wire.Failed() as failure):
                    failures.append((rank, failure))
        now_s = clock()
        fatal = limit.check(set(hellos), _missing_ranks(set(range(world_size)) - set(hellos)), now_s)
    arrived_ns = round(now_s * 1e9)
    control.put_back([Received(rank, arrived_ns, message) for rank, message in (*hellos.items(), *failures)])
    is_complete = len(hellos) == world_size and not failures
    return tuple(hellos[rank] for rank in range(world_size)) if is_complete else fatal or ()


def _missing_ranks(ranks: set[int]) -> str:
    names = ", ".join(f"rank {rank}" for rank in sorted(ranks))
    return f"{names}, which {_WHAT[StageState.ABSENT]} Or it measures still (--parallel auto)"
