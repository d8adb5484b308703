"""Microbatches on stages as they were computed: the picture that a pipeline is known by."""

from __future__ import annotations

from dataclasses import dataclass


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
        busy = sum(ended - begun for stage in self.spans for begun, ended in stage)
        return 1 - busy / (self.num_stages * self.wall)

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
