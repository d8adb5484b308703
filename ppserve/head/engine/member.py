"""What the head knows of one rank, the moves that a rank may make, and what can happen to a pipeline.

The states of a rank's stage process, and every move between them (`_NEXT`):

    ABSENT ──Hello──▶ LOADING ──Loaded──▶ LOADED ──Form──▶ FORMING ──Ready──▶ READY
       ▲                                    ▲                  └───epoch lost────┤
       │                                    │                                    ▼
       └── connection ends (any state)      └─────────────Broken───────────── LEAVING

A message that asks for another move is a fault of its sender.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from ppserve import wire
from ppserve.core.architecture import Architecture, StageLayout
from ppserve.core.plan import StepResult
from ppserve.core.scheduling.config import SchedulerConfig


class StageState(Enum):
    ABSENT = auto()
    LOADING = auto()
    LOADED = auto()
    FORMING = auto()
    READY = auto()
    LEAVING = auto()


_NEXT: dict[StageState, frozenset[StageState]] = {
    StageState.ABSENT: frozenset({StageState.ABSENT, StageState.LOADING}),
    StageState.LOADING: frozenset({StageState.ABSENT, StageState.LOADED}),
    StageState.LOADED: frozenset({StageState.ABSENT, StageState.FORMING}),
    StageState.FORMING: frozenset({StageState.ABSENT, StageState.READY, StageState.LEAVING, StageState.LOADED}),
    StageState.READY: frozenset({StageState.ABSENT, StageState.LEAVING, StageState.LOADED}),
    StageState.LEAVING: frozenset({StageState.ABSENT, StageState.LOADED}),
}


class InvalidMove(Exception):
    """A message asks for a move that the table does not have."""

    def __init__(self, rank: int, state: StageState, wanted: StageState) -> None:
        super().__init__(f"rank {rank} is {state.name} and cannot become {wanted.name}")


@dataclass(frozen=True, slots=True)
class Decision:
    """What the head decides once it knows all stages: who loads what, and how they talk.

    store_host: where stage 0 opens each epoch's store. scheduling: what the scheduler may do with this model.
    """

    architecture: Architecture
    layouts: tuple[StageLayout, ...]
    dtype: str
    transport: str
    store_host: str
    scheduling: SchedulerConfig


@dataclass(frozen=True, slots=True)
class StepDone:
    """A stage's result, its stamps on the head's clock."""

    result: StepResult


@dataclass(frozen=True, slots=True)
class StageDied:
    """A rank's stage process is gone; its keeper starts another."""

    rank: int
    stage: int
    cause: str


@dataclass(frozen=True, slots=True)
class EpochLost:
    """The pipeline broke: nothing that is in flight will return."""

    epoch: int
    cause: str


@dataclass(frozen=True, slots=True)
class Formed:
    """All stages are ready in this epoch; num_blocks: KV blocks that every stage has."""

    epoch: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Hopeless:
    """The pipeline will not form (again). usage: the operator's mistake rather than a failure."""

    reason: str
    usage: bool


MemberEvent = StepDone | StageDied | EpochLost | Formed | Hopeless


@dataclass(frozen=True, slots=True)
class Member:
    """What is known of one rank. clock_offset_ns: its clock minus the head's; progress: bytes loaded, of how many;
    since_ns: in this state; leave_by_ns: when a rank that is LEAVING is given up."""

    rank: int
    stage: int
    state: StageState = StageState.ABSENT
    hello: wire.Hello | None = None
    loaded: wire.Loaded | None = None
    progress: tuple[int, int] = (0, 0)
    since_ns: int = 0
    leave_by_ns: int = 0
    clock_offset_ns: int = 0
    best_rtt_ns: int = 1 << 62
    restarts: int = 0

    def moved(self, state: StageState, now_ns: int) -> Member:
        """In another state from now on. Raises InvalidMove where the table has no such move."""
        if state not in _NEXT[self.state]:
            raise InvalidMove(self.rank, self.state, state)
        return replace(self, state=state, since_ns=now_ns)
