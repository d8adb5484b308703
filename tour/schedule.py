"""Microbatches on stages as they were computed: the picture that a pipeline is known by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SLOWER = 1.05
"""The least ratio of times at which one schedule is called slower than another."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """m microbatches on p stages as they were computed. spans[stage][microbatch]: (begun, ended), from 0 on."""

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
        """The share of all stages' time in which they stood still."""
        return 1 - self.busy / (self.num_stages * self.wall)

    @property
    def busy(self) -> int:
        """The time that all stages computed."""
        return sum(ended - begun for stage in self.spans for begun, ended in stage)

    @property
    def ideal_bubble(self) -> float:
        """If all parts took the same time and hops took none: every stage waits p - 1 clocks of m + p - 1."""
        return (self.num_stages - 1) / (self.m + self.num_stages - 1)

    def rows(self, columns: int) -> list[str]:
        """Drawn to scale: one row of characters per stage, the number of the microbatch that it computed then."""
        rows = []
        for spans in self.spans:
            row = ["."] * columns
            for k, (begun, ended) in enumerate(spans):
                first, last = begun * columns // self.wall, ended * columns // self.wall
                row[first : max(last, first + 1)] = str(k) * max(last - first, 1)
            rows.append("".join(row[:columns]))
        return rows


def lesson(schedules: Sequence[Schedule]) -> str:
    """What schedules of the same work say, and nothing that they do not say. The first has one microbatch."""
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
