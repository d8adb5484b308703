"""The schedule of microbatches on stages, as it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SLOWER = 1.05
"""The least ratio of times at which one schedule is called slower than another."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The times at which p stages computed m microbatches, in nanoseconds from 0 on.

    spans[stage][microbatch]: (begun, ended).
    """

    m: int
    spans: list[list[tuple[int, int]]]

    @property
    def num_stages(self) -> int:
        return len(self.spans)

    @property
    def wall(self) -> int:
        return max(ended for stage in self.spans for _, ended in stage)

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they did not compute."""
        return 1 - self.busy / (self.num_stages * self.wall)

    @property
    def busy(self) -> int:
        """The time that all stages together computed, in nanoseconds."""
        return sum(ended - begun for stage in self.spans for begun, ended in stage)

    @property
    def ideal_bubble(self) -> float:
        """The bubble if all microbatches took the same time and transfers took none: each stage then waits p - 1
        of m + p - 1 clocks."""
        return (self.num_stages - 1) / (self.m + self.num_stages - 1)

    def rows(self, columns: int) -> list[str]:
        """Return a row of characters for each stage, to scale: the number of the microbatch that it computed, or a
        dot where it waited."""
        rows = []
        for spans in self.spans:
            row = ["."] * columns
            for k, (begun, ended) in enumerate(spans):
                first, last = begun * columns // self.wall, ended * columns // self.wall
                row[first : max(last, first + 1)] = str(k) * max(last - first, 1)
            rows.append("".join(row[:columns]))
        return rows


def lesson(schedules: Sequence[Schedule]) -> str:
    """Return, in words, what schedules of the same work show. Whatever they are, it claims nothing else. The first
    schedule has one microbatch."""
    one, best, last = schedules[0], min(schedules, key=lambda schedule: schedule.wall), schedules[-1]
    if best is one:
        return (
            f"here one microbatch is the quickest, {_ms(one)}: several save less in waiting than they cost, for"
            " every step has costs of its own, and every stage needs a core of its own."
        )
    said = f"with one microbatch the stages take turns, {_ms(one)}; with {best.m} they work at once, {_ms(best)}."
    if last.wall <= best.wall * _SLOWER:
        return said
    why = f"its stages stand still for {last.bubble:.0%} of the time, not {best.bubble:.0%}"
    if last.busy > best.busy:
        why = f"its smaller steps compute for {last.busy / best.busy - 1:.0%} longer in all"
    return f"{said} More is not always better: m = {last.m} takes {_ms(last)}, because {why}."


def _ms(schedule: Schedule) -> str:
    return f"{schedule.wall / 1e6:.1f} ms"
