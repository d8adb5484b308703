"""A world for the engine, in one thread: time, chance, and a network between the head and its ranks' processes.

Everything that happens is an event with a time; time jumps from one to the next. Chance comes from one generator,
so that a seed replays its history exactly. The sockets of the real control plane are the business of
`test_control`; here messages arrive late, in order, and after a cut, or never.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from ppserve import wire
from ppserve.head.engine.control import Disconnected, Received
from tests.head.engine.scripted import SECOND

# How soon what a cut held up arrives behind its end.
_RETRY_S = 0.02


class World:
    """Time, chance, and what will happen. trace: what has happened."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.between = self.random.uniform
        self.now_ns = SECOND
        self.trace: list[str] = []
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._num_events = 0

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self.now_ns + int(seconds * SECOND), self._num_events, action))

    def step(self) -> None:
        """The next event."""
        self.now_ns, _, action = heapq.heappop(self._events)
        action()

    def note(self, what: str) -> None:
        self.trace.append(f"{self.now_ns / SECOND:.4f} {what}")


class Network:
    """Which rank's control connection is cut in which direction, and whether stages reach each other."""

    def __init__(self) -> None:
        self.cut: set[tuple[int, str]] = set()
        self.stages_are_cut = False

    def is_cut(self, rank: int) -> bool:
        return not self.cut.isdisjoint({(rank, "up"), (rank, "down")})

    def heal(self, rank: int) -> None:
        self.cut -= {(rank, "up"), (rank, "down")}


class OneWay:
    """One direction of a connection. Messages arrive late and in order; during a cut they wait, as in TCP."""

    def __init__(self, world: World, network: Network, where: tuple[int, str], to: Callable[[Any], None]) -> None:
        self._world, self._network, self._where, self._to = world, network, where, to
        self._under_way: deque[Any] = deque()

    def send(self, message: Any) -> None:
        """None is the connection's end."""
        self._under_way.append(message)
        self._world.after(self._world.between(0.0001, 0.003), self._arrive)

    def _arrive(self) -> None:
        if self._where in self._network.cut:
            self._world.after(_RETRY_S, self._arrive)
        else:
            self._to(self._under_way.popleft())


class Connection:
    """A process's connection to the head. read: called with each message of the head, and with None at the end."""

    def __init__(self, control: SimulatedControl, rank: int, read: Callable[[Any], None]) -> None:
        self.rank = rank
        world, network = control.world, control.network
        self.up = OneWay(world, network, (rank, "up"), lambda message: control.arrive(self, message))
        self.down = OneWay(world, network, (rank, "down"), read)


class SimulatedControl:
    """A control plane: one connection from each rank. on_news: called when something has arrived."""

    def __init__(self, world: World, network: Network) -> None:
        self.world, self.network = world, network
        self.on_news: Callable[[], None] = lambda: None
        self.is_up = True
        self._connections: dict[int, Connection] = {}
        self._unread: list[tuple[Connection, Any]] = []
        self._dropped: list[Disconnected] = []

    def accepts(self, rank: int) -> bool:
        """A rank whose last process is still connected is refused, as the real control plane does."""
        return self.is_up and rank not in self._connections and not self.network.is_cut(rank)

    def connect(self, rank: int, read: Callable[[Any], None]) -> Connection:
        self._connections[rank] = Connection(self, rank, read)
        return self._connections[rank]

    def arrive(self, connection: Connection, message: Any) -> None:
        self._unread.append((connection, message))
        self.on_news()

    def poll(self, timeout_s: float) -> list[Received | Disconnected]:
        events: list[Received | Disconnected] = [*self._dropped]
        unread, self._unread, self._dropped = self._unread, [], []
        for connection, message in unread:
            rank = connection.rank
            if self._connections.get(rank) is not connection:
                continue
            if message is None or isinstance(message, wire.Failed):  # a keeper says nothing else
                del self._connections[rank]
            is_end = message is None
            events.append(Disconnected(rank, "exit") if is_end else Received(rank, self.world.now_ns, message))
        return events

    def wake(self) -> None:
        self.on_news()

    def send(self, ranks: Iterable[int], message: wire.FromHead) -> None:
        for rank in ranks:
            if rank in self._connections:
                self._connections[rank].down.send(message)

    def drop(self, rank: int, cause: str) -> None:
        if rank in self._connections:
            self.world.note(f"rank {rank} is cut off: {cause}")
            self._connections.pop(rank).down.send(None)
            self._dropped.append(Disconnected(rank, cause))
            self.on_news()

    def close(self, goodbye_s: float) -> None:
        """The head's process ends: so do all connections, and new ones are refused."""
        self.is_up = False
        self.on_news = lambda: None
        for connection in self._connections.values():
            connection.down.send(None)
        self._connections.clear()
