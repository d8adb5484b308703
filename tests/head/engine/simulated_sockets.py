"""The head's real control plane on simulated sockets: frames are bytes, which arrive late, in parts, and unless
the other end reads, not at all."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ppserve.errors import UsageError, WireError
from ppserve.head.engine.control import SocketControlPlane
from ppserve.process.greeting import _ANSWER_WITHIN_S, _RETRY_EVERY_S, Greeting
from tests.head.engine.simulated_world import SECOND, Network, OneWay, World

Do = Callable[[Callable[[], None]], None]


def at_once(action: Callable[[], None]) -> None:
    action()


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
        found = []
        for key in self._keys.values():
            ready = key.events & key.fileobj.ready if isinstance(key.fileobj, HeadEnd | Listener) else 0
            if ready:
                found.append((key, ready))
        if len(found) > 1:
            self._world.random.shuffle(found)
        return found

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class Listener:
    """Who has connected and was not accepted yet. is_starved: there is no free descriptor."""

    def __init__(self) -> None:
        self.waiting: list[HeadEnd] = []
        self.is_starved = False

    @property
    def ready(self) -> int:
        return selectors.EVENT_READ if self.waiting else 0

    def accept(self) -> tuple[HeadEnd, None]:
        if self.is_starved:
            raise OSError(errno.EMFILE, "Too many open files")
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
        if part is None:
            self._is_at_end = True
        else:
            self._arrived += part

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


class Connection:
    """Between a rank's process and the head: the process's end, as much of a socket as `HeadLink` uses.

    on_bytes: with what has arrived, once the process reads; nothing at the end. do: runs an action when the
    process runs. unread: bytes that it has not read. timeout_s: as it was set.
    """

    def __init__(
        self, control: SimulatedControl, rank: int, on_bytes: Callable[[bytes], object], do: Do = at_once
    ) -> None:
        self.rank = rank
        self.control = control
        self.unread = 0
        self.timeout_s: float | None = None
        self.on_bytes = on_bytes
        self.is_over = False
        self._do = do
        self._at_head = HeadEnd(self)
        self.up = OneWay(control.world, control.network, (rank, "up"), self._to_head)
        self.down = OneWay(control.world, control.network, (rank, "down"), self._to_process)
        control.listener.waiting.append(self._at_head)
        control.on_news()

    @property
    def room(self) -> int:
        return self.control.network.capacity - self.unread

    def settimeout(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s

    def sendall(self, data: bytes) -> None:
        self.up.send(data)

    def end(self) -> None:
        """Once: a process may end before or after whoever else ends its connection."""
        if not self.is_over:
            self.is_over = True
            self.up.send(None)

    def _read(self, part: bytes | None) -> None:
        """The process reads what has arrived."""
        if part is not None:
            was_full = self.room <= 0
            self.unread -= len(part)
            if was_full:
                self.control.on_news()
        if not self.is_over:
            self.on_bytes(part or b"")

    def _to_process(self, part: bytes | None) -> None:
        self._do(lambda: self._read(part))

    def _to_head(self, part: bytes | None) -> None:
        self._at_head.arrived(part)
        self.control.on_news()


class Greeter:
    """A process of a rank connects as `connect_to_head` does: the real greeting, again until it is welcome.

    control, secret: of the head that there is now. then: with the connection, once both have proved the secret.
    refused: by a head that will never let it in.
    """

    def __init__(
        self,
        world: World,
        rank: int,
        control: Callable[[], SimulatedControl],
        secret: Callable[[], bytes],
        then: Callable[[Connection], object],
        do: Do = at_once,
    ) -> None:
        self.connection: Connection | None = None
        self.refused: Callable[[str], object] = lambda _: None
        self._world, self._rank, self._do = world, rank, do
        self._control, self._secret, self._then = control, secret, then
        self._heard_ns = 0
        self._try()

    def _try(self) -> None:
        control = self._control()
        cut = control.network.cut
        if not control.is_up or (self._rank, "up") in cut or (self._rank, "down") in cut:
            self._again()
            return
        greeting = Greeting(self._secret(), self._rank)
        connection = Connection(control, self._rank, id, self._do)
        connection.on_bytes = partial(self._heard, connection, greeting)
        self.connection = connection
        self._heard_ns = self._world.now_ns
        self._watch(connection)

    def _again(self) -> None:
        self._world.after(_RETRY_EVERY_S, lambda: self._do(self._try))

    def _heard(self, connection: Connection, greeting: Greeting, part: bytes) -> None:
        self._heard_ns = self._world.now_ns
        try:
            if answer := greeting.heard(part):
                connection.sendall(answer)
        except UsageError as error:
            self.refused(str(error))
        except (OSError, WireError):
            connection.end()
            self._again()
        if greeting.is_done:
            self._then(connection)

    def _watch(self, connection: Connection) -> None:
        """Until it is welcome, the head answers within some time."""

        def look() -> None:
            if connection.is_over or connection.timeout_s is not None:
                return
            if self._world.now_ns - self._heard_ns >= _ANSWER_WITHIN_S * SECOND:
                connection.end()
                self._again()
            else:
                self._watch(connection)

        self._world.after(_ANSWER_WITHIN_S, lambda: self._do(look))


class SimulatedControl(SocketControlPlane):
    """The head's end, with nothing changed but its sockets."""

    def __init__(self, world: World, network: Network, num_ranks: int) -> None:
        self.world = world
        self.network = network
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
        super().close(0.0)  # nobody's clock moves meanwhile

    def die(self) -> None:
        """The head's process ends: so do all connections, and new ones are refused."""
        self.is_up = False
        self.on_news = lambda: None
        self.close(0.0)


def _close(*pair: socket.socket) -> None:
    for end in pair:
        with contextlib.suppress(OSError):
            end.close()
