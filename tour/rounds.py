"""Everything is measured in three rounds, of which the median is told: one disturbance changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

ROUNDS = 3
ROUGH = 0.3
"""The least spread at which figures are called rough."""

R = TypeVar("R")


def median(runs: Sequence[R], figure_of: Callable[[R], float]) -> R:
    """The run whose figure lies in the middle."""
    return sorted(runs, key=figure_of)[len(runs) // 2]


def spread(figures: Sequence[float]) -> float:
    """How far figures are apart, as a share of the one in the middle."""
    middle = median(figures, float)
    return (max(figures) - min(figures)) / middle if middle else 0.0
