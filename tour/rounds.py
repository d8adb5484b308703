"""Everything is measured in three rounds, and the median is shown, so one disturbance changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

ROUNDS = 3
ROUGH = 0.3
"""The least spread at which figures are called rough."""

R = TypeVar("R")


def median(runs: Sequence[R], figure_of: Callable[[R], float]) -> R:
    """Return the run with the median of the figures that `figure_of` gives."""
    return sorted(runs, key=figure_of)[len(runs) // 2]


def spread(figures: Sequence[float]) -> float:
    """Return the largest figure minus the smallest, divided by the median; 0 if the median is 0."""
    middle = median(figures, float)
    return (max(figures) - min(figures)) / middle if middle else 0.0
