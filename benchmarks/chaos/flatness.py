"""Does a process grow with the requests it has served? A growth per request, with bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, fmean, stdev

NUM_PARTS = 8


@dataclass(frozen=True, slots=True)
class Growth:
    """Per request, of whatever was sampled; low and high: the bounds of a 95% interval."""

    per_request: float
    low: float
    high: float

    def plainly_above(self, limit: float) -> bool:
        return self.low > limit

    def surely_below(self, limit: float) -> bool:
        return self.high < limit


def growth(samples: Sequence[tuple[int, float]]) -> Growth | None:
    """samples: (requests served, what was measured), in order. None if they are too few to say anything.

    The samples become the means of 8 equal parts. Memory that an allocator has taken it keeps, so the deviations
    of successive samples from a line are not independent, and a fit of them all would claim far too narrow bounds.
    The growths from part to part are nearly so: their mean is the growth, their spread gives its bounds.
    """
    if not samples or samples[-1][0] - samples[0][0] < NUM_PARTS:
        return None
    first, last = samples[0][0], samples[-1][0]
    width = (last - first) / NUM_PARTS
    parts: list[list[float]] = [[] for _ in range(NUM_PARTS)]
    for served, value in samples:
        parts[min(NUM_PARTS - 1, int((served - first) / width))].append(value)
    if not all(parts):
        return None
    means = [fmean(part) for part in parts]
    growths = [(b - a) / width for a, b in pairwise(means)]
    off = _student(len(growths) - 1) * stdev(growths) / len(growths) ** 0.5
    mean = fmean(growths)
    return Growth(mean, mean - off, mean + off)


def _student(degrees: int) -> float:
    """The 97.5% quantile of Student's t (Abramowitz and Stegun, 26.7.5)."""
    z = NormalDist().inv_cdf(0.975)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3
