"""Where the stages' time went over an interval: the difference of two readings of the server's ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ppserve.v1 import generation_pb2 as pb

CAUSES = ("fill_drain", "imbalance", "transfer", "token_return", "host")


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one stage; together its wall time. bubble_s: by cause."""

    stage: int
    busy_s: float
    bubble_s: Mapping[str, float]
    idle_s: float

    @property
    def demand_s(self) -> float:
        """Time in which the server had work, in seconds."""
        return self.busy_s + sum(self.bubble_s.values())

    @property
    def wall_s(self) -> float:
        return self.demand_s + self.idle_s

    @property
    def busy_share(self) -> float:
        """Share of demand time; 0 without demand."""
        return self.busy_s / self.demand_s if self.demand_s else 0.0

    @property
    def idle_share(self) -> float:
        """Share of wall time."""
        return self.idle_s / self.wall_s if self.wall_s else 0.0

    def bubble_share(self, cause: str | None = None) -> float:
        """Share of demand time; of all causes together when none is named."""
        if not self.demand_s:
            return 0.0
        seconds = sum(self.bubble_s.values()) if cause is None else self.bubble_s.get(cause, 0.0)
        return seconds / self.demand_s

    def since(self, earlier: StageTime) -> StageTime:
        """The time added since an earlier reading. If the server restarted in between: since its start."""
        if self.wall_s < earlier.wall_s:
            return self
        causes = {*self.bubble_s, *earlier.bubble_s}
        # Recent time is attributed provisionally, so a cause may lose a microsecond to another.
        return StageTime(
            self.stage,
            max(0.0, self.busy_s - earlier.busy_s),
            {c: max(0.0, self.bubble_s.get(c, 0.0) - earlier.bubble_s.get(c, 0.0)) for c in sorted(causes)},
            max(0.0, self.idle_s - earlier.idle_s),
        )


StageSeconds = tuple[StageTime, ...]
"""Where the time of every stage went, in order of the stages."""


def read_ledger(topology: pb.GetTopologyResponse) -> StageSeconds:
    """The totals of all stages."""
    return tuple(
        StageTime(stage.stage, stage.busy_seconds, dict(stage.bubble_seconds), stage.idle_seconds)
        for stage in topology.stages
    )


def between(earlier: StageSeconds, later: StageSeconds) -> StageSeconds:
    """The time added from one reading to the next; empty when their numbers of stages differ."""
    if len(earlier) != len(later):
        return ()
    return tuple(after.since(before) for before, after in zip(earlier, later, strict=True))
