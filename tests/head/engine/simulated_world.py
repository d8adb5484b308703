"""A world for the engine, in one thread: time, a network and processes, all simulated, all from one seed.

Whatever happens is an event with a time; time jumps from one to the next. Chance comes from one generator, so that
a seed replays its history exactly.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from ppserve import wire
from ppserve.head.engine.control import Gone, Heard

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
    """Which rank's control connection is cut, in which direction, and whether stages reach each other."""

    def __init__(self) -> None:
        self.cut: set[tuple[int, str]] = set()
        self.stages_are_cut = False
        self.wires: list[OneWay] = []

    def heal(self, rank: int) -> None:
        self.cut -= {(rank, "up"), (rank, "down")}
        for way in self.wires:
            way.resume()


class OneWay:
    """One direction of a connection: messages arrive late and in order, and after a cut, like TCP's."""

    def __init__(
        self, world: World, network: Network, where: tuple[int, str], to: Callable[[Any], None]
    ) -> None:
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


class Connection:
    """Between a stage's process and the head. `None` is its end, either way."""

    def __init__(self, control: SimulatedControl, rank: int, to_stage: Callable[[Any], None]) -> None:
        self.rank = rank
        self.control = control
        self.up = OneWay(control.world, control.network, (rank, "up"), self._at_head)
        self.down = OneWay(control.world, control.network, (rank, "down"), to_stage)

    def _at_head(self, message: Any) -> None:
        self.control.arrived(self, message)


class SimulatedControl:
    """The head's end (`engine.control.ControlPlane`), with the rules of the one with sockets: a rank that is
    connected is not connected again, and its end is read before its next process is judged."""

    def __init__(self, world: World, network: Network) -> None:
        self.world = world
        self.network = network
        self.on_news: Callable[[], None] = lambda: None
        self.is_up = True
        self._peers: dict[int, Connection] = {}
        self._inbox: list[Heard | Gone] = []
        self._knocking: list[Connection] = []

    # ---- what the engine calls ------------------------------------------------------------------------

    def poll(self, timeout_s: float) -> list[Heard | Gone]:
        for connection in self._knocking:
            is_taken = connection.rank in self._peers
            refusal = wire.Refused(f"rank {connection.rank} is connected already", may_retry=True)
            connection.down.send(refusal if is_taken else wire.Welcome(b""))
        self._knocking = []
        inbox, self._inbox = self._inbox, []
        return inbox

    def wake(self) -> None:
        self.on_news()

    def send(self, rank: int, message: wire.FromHead) -> None:
        if rank in self._peers:
            self._peers[rank].down.send(message)

    def broadcast(self, ranks: Iterable[int], message: wire.FromHead) -> None:
        for rank in ranks:
            self.send(rank, message)

    def drop(self, rank: int, cause: str) -> None:
        if rank in self._peers:
            self.world.note(f"rank {rank} is cut off: {cause}")
            self._end(self._peers[rank], cause)

    def close(self, goodbye_s: float) -> None:
        """Nothing waits here."""

    def die(self) -> None:
        """The head's process ends: so do all connections, and new ones are refused."""
        self.is_up = False
        self.on_news = lambda: None
        for connection in [*self._peers.values(), *self._knocking]:
            connection.down.send(None)
        self._peers.clear()

    # ---- what the network calls -----------------------------------------------------------------------

    def arrived(self, connection: Connection, message: Any) -> None:
        rank = connection.rank
        if not self.is_up:
            connection.down.send(None)
            return
        if isinstance(message, wire.Proof):
            self._knocking.append(connection)
            self.on_news()
            return
        if isinstance(message, wire.Hello) and rank not in self._peers:
            self._peers[rank] = connection
        if self._peers.get(rank) is not connection:
            return
        if message is None:
            self._end(connection, "exit")
        else:
            self._inbox.append(Heard(rank, self.world.now_ns, message))
            self.on_news()

    def _end(self, connection: Connection, cause: str) -> None:
        del self._peers[connection.rank]
        self._inbox.append(Gone(connection.rank, cause))
        connection.down.send(None)
        self.on_news()
