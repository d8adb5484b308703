"""What can be read of a replica and its stages at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from ppserve.core.cost_model import Coefficients
from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.overheads import OverheadTimes
from ppserve.head.engine.member import Decision, Member


@dataclass(frozen=True, slots=True)
class StageReading:
    """One stage at one moment."""

    times: StageTimes
    steps: int  # computed since the start
    cost: Coefficients  # of a step, by its size
    ranks: tuple[Member, ...]
    gathered_ns: tuple[int, ...]  # what each rank has waited for the others

    @property
    def member(self) -> Member:
        """Its first rank."""
        return self.ranks[0]


@dataclass(frozen=True, slots=True)
class ReplicaReading:
    """A replica at one moment."""

    now_ns: int  # on the engine's clock
    replica: int
    serves: bool  # all its stages are there
    decision: Decision
    epoch: int
    num_blocks: int
    microbatches: int
    overheads: OverheadTimes
    stages: tuple[StageReading, ...]
    num_running: int
    num_waiting: int  # requests that no replica computes
    kv_usage: float  # 0 to 1
