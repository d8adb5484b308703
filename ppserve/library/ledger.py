"""The ledger of a pipeline as a person reads it: a table in a terminal, the same in a notebook."""

from __future__ import annotations

from dataclasses import dataclass, replace
from html import escape

from ppserve.core.figures import table
from ppserve.core.ledger.causes import CAUSES
from ppserve.head.descriptions import StageDescription

_HEADINGS = ("stage", "layers", "busy", *CAUSES, "idle", "steps", "ms/step")


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where every stage's time went. `busy + bubbles + idle` is the wall time of every stage.

    Shares in the table are of the time in which there was work, except `idle`, which is of all time. advice: what
    would help most; empty when nothing would.
    """

    stages: tuple[StageDescription, ...]
    advice: str

    @property
    def wall_s(self) -> float:
        """Seconds since the pipeline was made, or between two ledgers: the same for every stage of a replica, and
        within microseconds for those of others."""
        first = self.stages[0]
        return first.busy_s + sum(first.bubble_s.values()) + first.idle_s

    def since(self, earlier: Ledger) -> Ledger:
        """What was added after an earlier ledger of the same pipeline."""
        return replace(self, stages=tuple(map(_since, self.stages, earlier.stages)))

    def __repr__(self) -> str:
        lines = table(_HEADINGS, *map(self._row, self.stages))
        ranks = [
            f"tensor ranks of stage {self._name(stage)} waited for each other for"
            f" {', '.join(f'{rank.gather_s:.3f}' for rank in stage.ranks)} s"
            for stage in self.stages
            if any(rank.gather_s for rank in stage.ranks)
        ]
        advice = [self.advice] if self.advice else []
        return "\n".join([*lines, f"{self.wall_s:.3f} s", *ranks, *advice])

    def _repr_html_(self) -> str:
        """For notebooks."""
        head = "".join(f"<th>{escape(heading)}</th>" for heading in _HEADINGS)
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in self._row(stage)) for stage in self.stages)
        rows = "".join(f"<tr>{row}</tr>" for row in cells)
        return f"<table><tr>{head}</tr>{rows}</table><p>{self.wall_s:.3f} s. {escape(self.advice)}</p>"

    def _name(self, stage: StageDescription) -> str:
        return f"{stage.replica}.{stage.stage}" if self.stages[-1].replica else str(stage.stage)

    def _row(self, stage: StageDescription) -> tuple[str, ...]:
        lost_s = [stage.bubble_s[cause] for cause in CAUSES]
        with_work_s = stage.busy_s + sum(lost_s)
        shares = [f"{spent_s / with_work_s:.1%}" if with_work_s else "-" for spent_s in (stage.busy_s, *lost_s)]
        idle = f"{stage.idle_s / (self.wall_s or 1):.1%}"
        step = f"{1e3 * stage.busy_s / stage.steps:.2f}" if stage.steps else "-"
        return (self._name(stage), stage.layers, *shares, idle, str(stage.steps), step)


def _since(now: StageDescription, before: StageDescription) -> StageDescription:
    busy_s, steps = now.busy_s - before.busy_s, now.steps - before.steps
    pairs = zip(now.ranks, before.ranks, strict=True)
    return replace(
        now,
        busy_s=busy_s,
        bubble_s={cause: seconds - before.bubble_s[cause] for cause, seconds in now.bubble_s.items()},
        idle_s=now.idle_s - before.idle_s,
        steps=steps,
        measured_step_s=busy_s / steps if steps else None,
        ranks=tuple(replace(rank, gather_s=rank.gather_s - then.gather_s) for rank, then in pairs),
    )
