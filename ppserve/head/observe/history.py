"""The last minutes of the server, a point for each second, which the page draws as lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ppserve.core.figures import quantile
from ppserve.core.ledger.account import StageTimes

EVERY_S = 1.0
MAX_POINTS = 300
"""Five minutes."""


class Point(NamedTuple):
    """What happened between two readings of the server; rounded, because every page is sent all points."""

    at_s: float
    """The time of its end, on the engine's clock."""
    tokens_per_s: float
    ttft_s: float | None
    """The median time to the first token; None if no request got one."""
    waiting: int
    """Requests that waited when it ended."""
    bubbles: float | None
    """The bubbles' share of the stages' time with work; None if there was no work."""


class Moment(NamedTuple):
    """The counters of the server, as they were at one moment."""

    at_ns: int
    load: Mapping[str, Any]
    """The result of `Metrics.read_load`."""
    times: Sequence[StageTimes]
    """The time of every stage since the start, always of the same stages."""


class History:
    """The latest MAX_POINTS points. One thread adds to them, and any may read them."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=MAX_POINTS)
        self._before: Moment | None = None

    def add(self, reading: Moment) -> None:
        """Note what happened since the reading before."""
        if self._before is not None:
            self._points.append(_between(self._before, reading))
        self._before = reading

    def points(self) -> list[Point]:
        """Return all points, oldest first. CPython copies a deque atomically."""
        return list(self._points)


def _between(before: Moment, after: Moment) -> Point:
    earlier, later = before.load, after.load
    counts = zip(later["ttft"]["counts"], earlier["ttft"]["counts"], strict=True)
    ttft_s = quantile(later["ttft"]["bounds_s"], [now - then for now, then in counts], 0.5)
    added = [now.since(then) for now, then in zip(after.times, before.times, strict=True)]
    demand_ns, computed_ns = sum(each.demand_ns for each in added), sum(each.computed_ns for each in added)
    num_tokens = later["generated_tokens"] - earlier["generated_tokens"]
    seconds = (after.at_ns - before.at_ns) / 1e9
    return Point(
        at_s=round(after.at_ns / 1e9, 3),
        tokens_per_s=round(num_tokens / seconds, 2),
        ttft_s=None if ttft_s is None else round(ttft_s, 5),
        waiting=later["waiting"],
        bubbles=round(1 - computed_ns / demand_ns, 4) if demand_ns else None,
    )
