"""The head's record of one rank, its changes of state, and the events of a pipeline.

The states of a rank's stage process, and the changes between them (`_NEXT`):

    ABSENT ──Hello──▶ LOADING ──Loaded──▶ LOADED ──Form──▶ FORMING ──Ready──▶ READY
       ▲                                   ▲ ▲                │ │              │ │
       │                                   │ └─────Broken─────┴─│──────────────┘ │
       │                                   │                    └───epoch lost───┤
       │                                   │                                     ▼
       └── connection ends (any state)     └──────────────Broken───────────── LEAVING

A rank that finds its transport broken leaves by itself: from FORMING or READY to LOADED. So does a rank that has
no memory for an epoch (`Unable`). A rank that cannot load its layers stays LOADING, and has none. A rank that is
LOADED becomes LOADING when it is assigned other layers. A message that asks for any other change is its sender's
error.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from msgspec.structs import replace

from ppserve import wire
from ppserve.core.architecture import Split, StageLayout
from ppserve.core.ledger.account import in_head_clock
from ppserve.core.partition import PartCosts, balance
from ppserve.core.plan import RankResult
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.errors import WireError


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
    StageState.LOADED: frozenset({StageState.ABSENT, StageState.LOADING, StageState.FORMING}),
    StageState.FORMING: frozenset({StageState.ABSENT, StageState.READY, StageState.LEAVING, StageState.LOADED}),
    StageState.READY: frozenset({StageState.ABSENT, StageState.LEAVING, StageState.LOADED}),
    StageState.LEAVING: frozenset({StageState.ABSENT, StageState.LOADED}),
}


@dataclass(frozen=True, slots=True)
class Decision:
    """The shape of a pipeline: each stage's layers, the transport, and what the scheduler must know of both.

    It is decided once all ranks have connected, and again when the layers are divided anew.
    """

    layouts: tuple[StageLayout, ...]
    transport: str
    scheduling: SchedulerConfig
    parts: PartCosts | None = None  # the mean of what the ranks measured; None if they did not measure

    @property
    def num_stages(self) -> int:
        return len(self.layouts)

    @property
    def layers(self) -> str:
        """The layers of each stage, and the predicted balance where costs were measured."""
        split = Split(tuple(layout.num_sublayers for layout in self.layouts))
        if self.parts is None:
            return str(split)
        return f"{split} (predicted balance {balance(self.parts.costs(split)):.0%})"


@dataclass(frozen=True, slots=True)
class EpochLost:
    """The epoch is lost: steps in flight will have no results."""

    rank: int | None = None  # the rank that reported an error; None if a rank died or was silent


MemberEvent = RankResult | EpochLost | wire.Ready
"""The stamps of a result are on the head's clock. A Ready is that of the last rank, so all ranks are ready."""


@dataclass(frozen=True, slots=True)
class Member:
    """The head's record of one rank."""

    rank: int
    stage: int
    tensor: int = 0  # which of the stage's ranks it is
    state: StageState = StageState.ABSENT
    hello: wire.Hello | None = None
    loaded: wire.Loaded | None = None
    layout: StageLayout | None = None  # the layers that it was last told to load; None if it has none
    progress: tuple[int, int] = (0, 0)  # how many bytes it has loaded, and of how many
    since_ns: int = 0  # when this state began
    due_ns: int | None = None  # when it is cut off if it is still in this state; None if never
    round_trips: tuple[tuple[int, int], ...] = ()  # of pings: how long it took, and its clock minus the head's
    restarts: int = 0
    unusable: str | None = None  # why it cannot serve, until another process of it greets

    @property
    def clock_offset_ns(self) -> int:
        """Its clock minus the head's, by the shortest round trip. Old ones are forgotten, because clocks drift."""
        return min(self.round_trips)[1] if self.round_trips else 0

    def on_head_clock(self, result: RankResult) -> RankResult:
        """Return the result with stamps of the head's clock."""
        offset_ns = self.clock_offset_ns
        return replace(result, stamps=in_head_clock(result.stamps, offset_ns)) if offset_ns else result

    def check_move(self, state: StageState) -> None:
        """Raise WireError if `_NEXT` has no such change."""
        if state not in _NEXT[self.state]:
            raise WireError(f"rank {self.rank} is {self.state.name} and cannot become {state.name}")


def round_trip(beat: wire.Heartbeat, now_ns: int) -> tuple[int, int]:
    """Return how long a ping and its answer took, and how far the rank's clock is ahead of the head's."""
    return now_ns - beat.echo_ns, beat.clock_ns - (beat.echo_ns + now_ns) // 2
