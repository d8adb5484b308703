"""The ledger of a pipeline as a person reads it: a table in a terminal, the same in colour in a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape

from ppserve.core.figures import table
from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.causes import CAUSES
from ppserve.head.engine.reading import ReplicaReading
from ppserve.head.handle import give_advice

_HEADINGS = ("stage", "layers", "busy", *CAUSES, "idle", "steps", "ms/step")


@dataclass(frozen=True, slots=True)
class StageLedger:
    """One stage of a ledger."""

    stage: int
    layers: str  # of the model, as `0-6`
    times: StageTimes  # its wall time, in nanoseconds by kind
    steps: int  # computed
    replica: int | None = None  # None where there is only one
    gathered_ns: tuple[int, ...] = (0,)  # of each tensor rank, its waits for others; `gather` is their average

    @property
    def name(self) -> str:
        return str(self.stage) if self.replica is None else f"{self.replica}.{self.stage}"

    @property
    def gathered_s(self) -> tuple[float, ...]:
        """Seconds in which each tensor rank waited for the others."""
        return tuple(ns / 1e9 for ns in self.gathered_ns)

    @property
    def busy_s(self) -> float:
        """Seconds in which it computed."""
        return self.times.computed_ns / 1e9

    @property
    def bubble_s(self) -> dict[str, float]:
        """Seconds in which it waited while there was work, by cause."""
        return {cause: ns / 1e9 for cause, ns in self.times.bubble_ns.items()}

    @property
    def idle_s(self) -> float:
        """Seconds without any work."""
        return self.times.idle_ns / 1e9


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where every stage's time went. `busy + bubbles + idle` is the wall time of every stage, exactly.

    Shares in the table are of the time in which there was work, except `idle`, which is of all time. advice: what
    would help most; empty when nothing would.
    """

    stages: tuple[StageLedger, ...]
    advice: str

    @property
    def wall_s(self) -> float:
        """Seconds since the pipeline was made, or between two ledgers: the same for every stage of a replica, and
        within microseconds for those of others."""
        return self.stages[0].times.wall_ns / 1e9

    def since(self, earlier: Ledger) -> Ledger:
        """What was added after an earlier ledger of the same pipeline."""
        stages = tuple(map(_since, self.stages, earlier.stages))
        return replace(self, stages=stages)

    def __repr__(self) -> str:
        lines = table(_HEADINGS, *map(_row, self.stages))
        ranks = [
            f"tensor ranks of stage {stage.name} waited for each other for"
            f" {', '.join(f'{seconds:.3f}' for seconds in stage.gathered_s)} s"
            for stage in self.stages
            if any(stage.gathered_ns)
        ]
        advice = [self.advice] if self.advice else []
        return "\n".join([*lines, f"{self.wall_s:.3f} s", *ranks, *advice])

    def _repr_html_(self) -> str:
        """For notebooks."""
        head = "".join(f"<th>{escape(heading)}</th>" for heading in _HEADINGS)
        rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in _row(s))}</tr>" for s in self.stages)
        return f"<table><tr>{head}</tr>{rows}</table><p>{self.wall_s:.3f} s. {escape(self.advice)}</p>"


def ledger_of(readings: tuple[ReplicaReading, ...]) -> Ledger:
    stages = tuple(stage for reading in readings for stage in _stages(reading, readings))
    return Ledger(stages, give_advice(readings))


def _stages(reading: ReplicaReading, among: tuple[ReplicaReading, ...]) -> Iterator[StageLedger]:
    replica = reading.replica if len(among) > 1 else None
    for stage in reading.stages:
        number = stage.member.stage
        span = reading.decision.layouts[number].span
        yield StageLedger(number, span, stage.times, stage.steps, replica, stage.gathered_ns)


def _since(now: StageLedger, before: StageLedger) -> StageLedger:
    gathered_ns = tuple(ns - was for ns, was in zip(now.gathered_ns, before.gathered_ns, strict=True))
    times, steps = now.times.since(before.times), now.steps - before.steps
    return replace(now, times=times, steps=steps, gathered_ns=gathered_ns)


def _row(stage: StageLedger) -> tuple[str, ...]:
    times = stage.times
    of_demand = (times.busy_share, *map(times.bubble_share, CAUSES))
    shares = [f"{share:.1%}" if times.demand_ns else "-" for share in of_demand]
    step = f"{1e3 * stage.busy_s / stage.steps:.2f}" if stage.steps else "-"
    return (stage.name, stage.layers, *shares, f"{times.idle_share:.1%}", str(stage.steps), step)
