"""What draft tokens as further rows of a lone sequence's steps cost, by measurement.

A step's time on a stage, which the cost model fits, is only a part of the time from token to token: plans, hidden
states and tokens travel, and the head works. And the fit is for steps of all sizes: a short prompt, the first step
after a pause, has few rows too and takes longer than draft tokens do. So a lone sequence's steps are compared
with each other alone: those with draft tokens with those without.
"""

from __future__ import annotations

from collections import deque
from statistics import median

# Steps of either kind that are remembered, and those with draft tokens that must be known to tell what a row
# costs.
_REMEMBERED, _LEAST_KNOWN = 32, 3


class RowCost:
    """A lone sequence's steps, with draft tokens and without."""

    def __init__(self) -> None:
        self._plain_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._wide_s: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)

    @property
    def is_known(self) -> bool:
        return len(self._wide_s) >= _LEAST_KNOWN and bool(self._plain_s)

    def observe(self, num_draft_tokens: int, seconds: float) -> None:
        """The sequence had its tokens so long after the ones before, by a step with so many draft tokens."""
        if num_draft_tokens:
            self._wide_s.append((num_draft_tokens, seconds))
        else:
            self._plain_s.append(seconds)

    def share(self) -> float:
        """What each further row adds to the time from token to token, as a share of that without draft tokens.
        Zero as long as little is known, so that draft tokens are made and their cost is learnt. Computed when a
        draft token asks for it: every token is observed."""
        if not self.is_known or not (plain_s := median(self._plain_s)):  # zero by a clock that stands still
            return 0.0
        return max(0.0, median((s / plain_s - 1) / count for count, s in self._wide_s))

    def forget(self) -> None:
        """What was learnt in a bad moment would be never corrected: rows that cost too much are not computed."""
        self._wide_s.clear()
