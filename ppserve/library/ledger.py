"""Where the time of a pipeline's stages went, for programs and notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from ppserve.core.figures import table
from ppserve.core.ledger.causes import CAUSES
from ppserve.head.descriptions import StageDescription

_TOTALS = ("busy_s", "idle_s", "steps")
_HEADINGS = ("stage", "layers", "busy", *CAUSES, "idle", "steps", "ms/step")


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where every stage's time went: `busy + bubbles + idle` is its wall time."""

    stages: tuple[StageDescription, ...]
    advice: str  # what would help most; empty if nothing would

    @property
    def wall_s(self) -> float:
        """The seconds since the pipeline was made, or between two ledgers."""
        return sum(_spent_s(self.stages[0]))

    def since(self, earlier: Ledger) -> Ledger:
        """Return the time that was added since an earlier ledger of the pipeline."""
        return replace(self, stages=tuple(map(_since, self.stages, earlier.stages)))

    def __repr__(self) -> str:
        advice = [self.advice] if self.advice else []
        return "\n".join([*table(_HEADINGS, *map(self._row, self.stages)), f"{self.wall_s:.3f} s", *advice])

    def _repr_html_(self) -> str:
        """Return a table of HTML, which notebooks show."""
        rows = "".join(f"<tr>{_cells('td', self._row(stage))}</tr>" for stage in self.stages)
        advice = f"<p>{escape(self.advice)}</p>" if self.advice else ""
        table_of_rows = f"<table><thead><tr>{_cells('th', _HEADINGS)}</tr></thead><tbody>{rows}</tbody></table>"
        return f"{table_of_rows}<p>{self.wall_s:.3f} s</p>{advice}"

    def _row(self, stage: StageDescription) -> tuple[str, ...]:
        name = f"{stage.replica}.{stage.stage}" if self.stages[-1].replica else str(stage.stage)
        shares = [f"{spent_s / (self.wall_s or 1):.1%}" for spent_s in _spent_s(stage)]
        step = f"{1e3 * stage.busy_s / stage.steps:.2f}" if stage.steps else "-"
        return (name, stage.layers, *shares, str(stage.steps), step)


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)


def _spent_s(stage: StageDescription) -> list[float]:
    return [stage.busy_s, *(stage.bubble_s[cause] for cause in CAUSES), stage.idle_s]


def _since(now: StageDescription, before: StageDescription) -> StageDescription:
    added: dict[str, Any] = {name: getattr(now, name) - getattr(before, name) for name in _TOTALS}
    bubble_s = {cause: seconds - before.bubble_s[cause] for cause, seconds in now.bubble_s.items()}
    pairs = zip(now.ranks, before.ranks, strict=True)
    ranks = tuple(replace(rank, gather_s=rank.gather_s - then.gather_s) for rank, then in pairs)
    step_s = added["busy_s"] / added["steps"] if added["steps"] else None
    return replace(now, **added, bubble_s=bubble_s, measured_step_s=step_s, ranks=ranks)
