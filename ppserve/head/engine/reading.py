"""What can be read of a replica and its stages at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from ppserve.core.cost_model import Coefficients
from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.overheads import OverheadTimes
from ppserve.head.engine.member import Decision, Member


@dataclass(frozen=True, slots=True)
class StageReading:
    """One stage at one moment. steps: computed since the start. cost: of a step, by its size. ranks: of the
    stage. gathered_ns: what each has waited for the others.
    """

    times: StageTimes
    steps: int
    cost: Coefficients
    ranks: tuple[Member, ...]
    gathered_ns: tuple[int, ...]

    @property
    def member(self) -> Member:
        """Its first rank."""
        return self.ranks[0]


@dataclass(frozen=True, slots=True)
class ReplicaReading:
    """A replica at one moment, on the engine's clock. Frozen. serves: all its stages are there. num_waiting:
    requests that no replica computes. kv_usage: 0 to 1."""

    now_ns: int
    replica: int
    serves: bool
    decision: Decision
    epoch: int
    num_blocks: int
    microbatches: int
    overheads: OverheadTimes
    stages: tuple[StageReading, ...]
    num_running: int
    num_waiting: int
    kv_usage: float
