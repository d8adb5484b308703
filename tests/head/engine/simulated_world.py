"""A world for the engine, in one thread: time, chance, and a network between the head and its ranks' processes.

Whatever happens is an event with a time; time jumps from one to the next. Chance comes from one generator, so that
a seed replays its history exactly. The head's control plane is the real one. Only its sockets are simulated: bytes
arrive late, in parts, and, where the other end does not read, not at all.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import selectors
import socket
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any

from ppserve.errors import UsageError, WireError
from ppserve.head.engine.control import SocketControlPlane
from ppserve.process.greeting import _RETRY_EVERY_S, Greeting

SECOND = 1_000_000_000

Do = Callable[[Callable[[], None]], None]
"""Runs an action when a process runs: later, or never, where it stands still or has ended."""


class World:
    """Time, chance, and what will happen. trace: what has happened."""

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
    """Which rank's control connection is cut in which direction, and whether stages reach each other."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """Bytes that a connection holds while nobody reads."""
        self.cut: set[tuple[int, str]] = set()
        self.stages_are_cut = False
        self.ways: list[OneWay] = []

    def heal(self, rank: int) -> None:
        self.cut -= {(rank, "up"), (rank, "down")}
        for way in self.ways:
            way.resume()


class OneWay:
    """One direction of a connection: parts arrive late, in order, and after a cut, like TCP's; at the end None."""

    def __init__(
        self, world: World, network: Network, where: tuple[int, str], to: Callable[[bytes | None], None]
    ) -> None:
        self._world, self._network, self._where, self._to = world, network, where, to
        self._under_way: deque[bytes | None] = deque()
        network.ways.append(self)

    def send(self, part: bytes | None) -> None:
        self._under_way.append(part)
        self._world.after(self._world.between(0.0001, 0.003), self._arrive)

    def resume(self) -> None:
        for _ in self._under_way:
            self._world.after(self._world.between(0.0001, 0.003), self._arrive)

    def _arrive(self) -> None:
        if self._under_way and self._where not in self._network.cut:
            self._to(self._under_way.popleft())


# ---- the head's end ---------------------------------------------------------------------------------------


class Listener:
    """The head's listening socket: connections that were not accepted yet."""

    def __init__(self) -> None:
        self.waiting: list[HeadEnd] = []

    @property
    def ready(self) -> int:
        return selectors.EVENT_READ if self.waiting else 0

    def accept(self) -> tuple[HeadEnd, None]:
        return self.waiting.pop(0), None

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def fileno(self) -> int:
        return 1

    def close(self) -> None:
        while self.waiting:
            self.waiting.pop().close()


class HeadEnd:
    """The head's end of a connection, as much of a socket as the control plane uses."""

    family = socket.AF_UNIX

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._arrived = bytearray()
        self._is_at_end = self._is_closed = False

    @property
    def ready(self) -> int:
        reads = selectors.EVENT_READ if self._arrived or self._is_at_end else 0
        return reads | (selectors.EVENT_WRITE if self._connection.room > 0 else 0)

    def arrived(self, part: bytes | None) -> None:
        self._is_at_end |= part is None
        self._arrived += part or b""

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def fileno(self) -> int:
        return -1 if self._is_closed else 2

    def recv(self, size: int) -> bytes:
        if self._is_closed:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if not self._arrived and not self._is_at_end:
            raise BlockingIOError
        part = bytes(self._arrived[:size])
        del self._arrived[:size]
        return part

    def send(self, data: bytes) -> int:
        if self._connection.room <= 0:
            raise BlockingIOError
        part = bytes(data[: self._connection.room])
        self._connection.unread += len(part)
        self._connection.down.send(part)
        return len(part)

    def close(self) -> None:
        assert not self._is_closed
        self._is_closed = True
        self._connection.down.send(None)


class Selector(selectors.BaseSelector):
    """Which of the simulated sockets are ready; several in any order, as the kernel would say."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        assert fileobj not in self._keys
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, fileobj.fileno(), events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        if fileobj.fileno() < 0:
            raise ValueError("Invalid file descriptor: -1")
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        keys = [key for key in self._keys.values() if isinstance(key.fileobj, HeadEnd | Listener)]
        found = [(key, ready) for key in keys if (ready := key.events & key.fileobj.ready)]
        if len(found) > 1:
            self._world.random.shuffle(found)
        return found

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class SimulatedControl(SocketControlPlane):
    """The head's control plane, with nothing changed but its sockets. on_news: something has arrived."""

    def __init__(self, world: World, network: Network, num_ranks: int) -> None:
        self.world, self.network = world, network
        self.on_news: Callable[[], None] = lambda: None
        self.is_up = True
        self.listener = Listener()
        # On one host each head has another.
        self.secret = b"of the head that began at %d" % world.now_ns
        listener: Any = self.listener
        super().__init__(listener, num_ranks, self.secret, selector=Selector(world), clock=lambda: world.now_ns)
        weakref.finalize(self, _close, self._wake_in, self._wake_out)

    def wake(self) -> None:
        self.on_news()

    def drop(self, rank: int, cause: str) -> None:
        self.world.note(f"rank {rank} is cut off: {cause}")
        super().drop(rank, cause)

    def close(self, goodbye_s: float) -> None:
        super().close(0.0)  # no clock advances meanwhile

    def die(self) -> None:
        """The head's process ends: so do all connections, and new ones are refused."""
        self.is_up = False
        self.on_news = lambda: None
        self.close(0.0)


def _close(*pair: socket.socket) -> None:
    for end in pair:
        with contextlib.suppress(OSError):
            end.close()


# ---- a process's end --------------------------------------------------------------------------------------


class Connection:
    """A process's connection to the head, as much of a socket as `HeadLink` uses."""

    def __init__(self, control: SimulatedControl, rank: int, do: Do) -> None:
        self.on_bytes: Callable[[bytes], object] = id
        """Called with what has arrived, once the process reads; with nothing at the end."""
        self.unread = 0
        """Bytes that the process has not read."""
        self._control, self._do = control, do
        self._is_over = False
        self._at_head = HeadEnd(self)
        self._up = OneWay(control.world, control.network, (rank, "up"), self._to_head)
        self.down = OneWay(control.world, control.network, (rank, "down"), self._to_process)
        control.listener.waiting.append(self._at_head)
        control.on_news()

    @property
    def room(self) -> int:
        return self._control.network.capacity - self.unread

    def settimeout(self, timeout_s: float | None) -> None:
        """Stages watch the head's silence themselves here."""

    def sendall(self, data: bytes) -> None:
        self._up.send(data)

    def end(self) -> None:
        """Once: a process may end before or after its connection is ended for it."""
        if not self._is_over:
            self._is_over = True
            self._up.send(None)

    def _to_process(self, part: bytes | None) -> None:
        self._do(lambda: self._read(part))

    def _read(self, part: bytes | None) -> None:
        was_full = self.room <= 0
        self.unread -= len(part or b"")
        if was_full:
            self._control.on_news()
        if not self._is_over:
            self.on_bytes(part or b"")

    def _to_head(self, part: bytes | None) -> None:
        self._at_head.arrived(part)
        self._control.on_news()


class Greeter:
    """A process of a rank connects as `connect_to_head` does: the real greeting, again until it is welcome.

    control, secret: of the head that there is now. then: with the connection, once both have proved the secret.
    refused: by a head that will never let it in.
    """

    def __init__(
        self,
        rank: int,
        control: Callable[[], SimulatedControl],
        secret: Callable[[], bytes],
        then: Callable[[Connection], object],
        refused: Callable[[str], object],
        do: Do,
    ) -> None:
        self.connection: Connection | None = None
        self._rank, self._do, self._control, self._secret = rank, do, control, secret
        self._then, self._refused = then, refused
        self._try()

    def _try(self) -> None:
        control = self._control()
        if not control.is_up or {(self._rank, "up"), (self._rank, "down")} & control.network.cut:
            self._again()
            return
        self.connection = connection = Connection(control, self._rank, self._do)
        connection.on_bytes = partial(self._hear, connection, Greeting(self._secret(), self._rank))

    def _again(self) -> None:
        self._control().world.after(_RETRY_EVERY_S, lambda: self._do(self._try))

    def _hear(self, connection: Connection, greeting: Greeting, part: bytes) -> None:
        try:
            if answer := greeting.heard(part):
                connection.sendall(answer)
        except UsageError as error:
            self._refused(str(error))
        except (OSError, WireError):
            connection.end()
            self._again()
        if greeting.is_done:
            self._then(connection)
