"""What happens in a simulation, in the order of time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """Things to be done at their times; those at the same time in the order in which they were asked for."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()

    def at(self, at_s: float, do: Callable[[float], None]) -> None:
        """at_s: not before what is done now. do: is given this time."""
        heapq.heappush(self._events, (at_s, next(self._numbers), do))

    def run(self) -> None:
        """Until nothing is to be done any more."""
        while self._events:
            at_s, _, do = heapq.heappop(self._events)
            do(at_s)
