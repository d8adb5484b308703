"""Ratios of a measurement, and the verdicts on them.

The median of n ratios differs by chance; its standard error is taken from their quartiles. A claim fails if the
median misses what is wanted by more than two standard errors. It holds if the median exceeds that by as much. It
also holds if the median does what is wanted and two standard errors are at most what the claim has to tell apart,
such as 0.97 from 1. Anything else is unclear: another run, on an idler machine or with more turns, decides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

LEAST_RATIO = 0.97


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median, the quartiles, and the standard error of the median. count: of the ratios."""

    middle: float
    low: float
    high: float
    error: float
    count: int

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Ratio:
        low, middle, high = statistics.quantiles(ratios, n=4)
        # Normal distribution: quartiles are 1.349 deviations apart, the median's error is 1.253 times a mean's.
        return cls(middle, low, high, 1.253 / 1.349 * (high - low) / math.sqrt(len(ratios)), len(ratios))

    def __str__(self) -> str:
        return f"x{self.middle:.2f} ±{self.error:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass
class Verdicts:
    """Says each verdict as it falls, and remembers those that did not hold."""

    num_all: int = 0
    failed: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)

    def at_least(self, value: float, error: float, bound: float, claim: str, other: float = 1.0) -> None:
        """error: the standard error of the value. other: what the bound has to be told apart from."""
        told = f"{claim}: {value:.2f} ±{error:.2f}, at least {bound:.2f} wanted"
        self._say(bound - value, error, abs(other - bound), told)

    def at_most(self, value: float, error: float, bound: float, claim: str, other: float = 1.0) -> None:
        told = f"{claim}: {value:.2f} ±{error:.2f}, at most {bound:.2f} wanted"
        self._say(value - bound, error, abs(other - bound), told)

    def _say(self, missed_by: float, error: float, apart: float, claim: str) -> None:
        self.num_all += 1
        said = "holds"
        is_known = math.isfinite(missed_by) and math.isfinite(error)
        if is_known and missed_by > 2 * error:
            said = "FAILS"
            self.failed.append(claim)
        elif not is_known or missed_by > 0 or 2 * error > max(apart, -missed_by):
            said = "unclear"
            self.unclear.append(claim)
        print(f"    {said}: {claim}", flush=True)

    def end(self) -> int:
        """Says all that did not hold. Returns the exit code: 1 if any failed, 2 if some are unclear."""
        print(f"{self.num_all} verdicts, {len(self.failed)} of them failed, {len(self.unclear)} are unclear")
        for claim in self.unclear:
            print(f"unclear: {claim}")
        for claim in self.failed:
            print(f"FAILED: {claim}")
        return 1 if self.failed else 2 if self.unclear else 0
