"""Ratios of a measurement, and the verdicts on them.

A load is slower than it may be if the median of its ratios is below LEAST_RATIO *and* below the lower quartile of
its own `off beside off`: of what two turns without the change differ by in the same minutes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

LEAST_RATIO = 0.97


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median and the quartiles."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Ratio:
        low, middle, high = statistics.quantiles(ratios, n=4)
        return cls(middle, low, high)

    def __str__(self) -> str:
        return f"x{self.middle:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass
class Verdicts:
    """Says each verdict as it falls, and remembers those that failed."""

    num_all: int = 0
    failed: list[str] = field(default_factory=list)

    def say(self, holds: bool, claim: str) -> None:
        self.num_all += 1
        if not holds:
            self.failed.append(claim)
        print(f"    {'holds' if holds else 'FAILS'}: {claim}", flush=True)

    def not_slower(self, load: str, ratio: Ratio, beside: Ratio) -> None:
        """ratio, beside: speeds of the change and of the control, each in those without it."""
        holds = ratio.middle >= LEAST_RATIO or ratio.middle >= beside.low
        self.say(holds, f"{load}: x{ratio.middle:.2f}, at least {LEAST_RATIO} or {beside.low:.2f} wanted")

    def not_later(self, load: str, ratio: Ratio, beside: Ratio) -> None:
        """ratio, beside: of times to the first token."""
        holds = ratio.middle <= 1 / LEAST_RATIO or ratio.middle <= beside.high
        wanted = f"at most {1 / LEAST_RATIO:.2f} or {beside.high:.2f} wanted"
        self.say(holds, f"{load}, first token: x{ratio.middle:.2f}, {wanted}")

    def end(self) -> int:
        """Says all that failed. Returns the exit code."""
        print(f"{self.num_all} verdicts, {len(self.failed)} of them failed")
        for claim in self.failed:
            print(f"FAILED: {claim}")
        return 1 if self.failed else 0
