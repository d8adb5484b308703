"""A world for the engine, in one thread: time, a network and processes, all simulated, all from one seed.

Whatever happens is an event with a time; time jumps from one to the next. Chance comes from one generator, so that
a seed replays its history exactly.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

SECOND = 1_000_000_000


class World:
    """Time, chance, and what will happen. trace: what did, for whoever looks into a history."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now_ns = SECOND
        self.trace: list[str] = []
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._num_events = 0

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self.now_ns + int(seconds * SECOND), self._num_events, action))

    def between(self, least_s: float, most_s: float) -> float:
        return self.random.uniform(least_s, most_s)

    def step(self) -> None:
        """The next event."""
        self.now_ns, _, action = heapq.heappop(self._events)
        action()

    def note(self, what: str) -> None:
        self.trace.append(f"{self.now_ns / SECOND:.4f} {what}")


class Network:
    """Which rank's control connection is cut, in which direction, and whether stages reach each other. capacity:
    of a connection, in bytes."""

    def __init__(self, capacity: int = 1 << 16) -> None:
        self.capacity = capacity
        self.cut: set[tuple[int, str]] = set()
        self.stages_are_cut = False
        self.wires: list[OneWay] = []

    def heal(self, rank: int) -> None:
        self.cut -= {(rank, "up"), (rank, "down")}
        for way in self.wires:
            way.resume()


class OneWay:
    """One direction of a connection: messages arrive late and in order, and after a cut, like TCP's."""

    def __init__(self, world: World, network: Network, where: tuple[int, str], to: Callable[[Any], None]) -> None:
        self._world = world
        self._network = network
        self._where = where
        self._to = to
        self._under_way: deque[Any] = deque()
        network.wires.append(self)

    def send(self, message: Any) -> None:
        self._under_way.append(message)
        self._world.after(self._world.between(0.0001, 0.003), self._arrive)

    def resume(self) -> None:
        for _ in self._under_way:
            self._world.after(self._world.between(0.0001, 0.003), self._arrive)

    def _arrive(self) -> None:
        if self._under_way and self._where not in self._network.cut:
            self._to(self._under_way.popleft())
