"""Where the stages' time went: the difference of two readings of the ledger."""

from __future__ import annotations

from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.causes import CAUSES, IDLE
from ppserve.v1 import generation_pb2 as pb

BUSY = "busy"


def read_ledger(topology: pb.GetTopologyResponse) -> tuple[StageTimes, ...]:
    """Return the totals of all stages, in their order. The phases of busy time are not distinguished."""
    return tuple(
        StageTimes(
            {BUSY: round(stage.busy_seconds * 1e9)},
            {cause: round(stage.bubble_seconds.get(cause, 0.0) * 1e9) for cause in CAUSES},
            round(stage.idle_seconds * 1e9),
        )
        for stage in topology.stages
    )


def between(earlier: tuple[StageTimes, ...], later: tuple[StageTimes, ...]) -> tuple[StageTimes, ...]:
    """Return each stage's time between two readings, or since its server restarted; empty if their number
    changed."""
    if len(earlier) != len(later):
        return ()
    pairs = zip(earlier, later, strict=True)
    return tuple(now.since(then) if now.wall_ns >= then.wall_ns else now for then, now in pairs)


def shares(times: StageTimes) -> dict[str, float]:
    """Return the shares of a stage's wall time by kind, busy first and idle last. They sum to 1; without any time
    it is all idle."""
    spent_ns = {BUSY: times.computed_ns, **times.bubble_ns, IDLE: times.idle_ns if times.wall_ns else 1}
    return {kind: ns / (times.wall_ns or 1) for kind, ns in spent_ns.items()}
