"""The head's real control plane on simulated sockets: frames are bytes, which arrive late, in parts, and unless
the other end reads, not at all."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ppserve import wire
from ppserve.head.engine.control import SocketControlPlane
from ppserve.process.proof import rank_proof
from tests.head.engine.simulated_world import Network, OneWay, World

SECRET = b"the secret of this server"


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
    """Between a rank's process and the head.

    on_message: with each message of the head, in the process; None is the end. The challenge is answered here.
    last: what a keeper says when it is welcomed; then it hangs up. unread: bytes that the process has not read.
    """

    def __init__(
        self,
        control: SimulatedControl,
        rank: int,
        on_message: Callable[[Any], None],
        last: wire.GaveUp | None = None,
    ) -> None:
        self._last = last
        self.rank = rank
        self.control = control
        self.unread = 0
        self._on_message = on_message
        self._reader = wire.FrameReader(wire.FromHead)
        self._at_head = HeadEnd(self)
        self.up = OneWay(control.world, control.network, (rank, "up"), self._to_head)
        self.down = OneWay(control.world, control.network, (rank, "down"), self._to_process)
        control.listener.waiting.append(self._at_head)
        control.on_news()

    @property
    def room(self) -> int:
        return self.control.network.capacity - self.unread

    def say(self, message: wire.FromStage | wire.FromStranger) -> None:
        self.up.send(wire.encode(message))

    def end(self) -> None:
        self.up.send(None)

    def read(self, part: bytes | None) -> None:
        """The process reads what has arrived."""
        if part is None:
            self._on_message(None)
            return
        was_full = self.room <= 0
        self.unread -= len(part)
        if was_full:
            self.control.on_news()
        for message in self._reader.feed(part):
            if isinstance(message, wire.Challenge):
                answer = rank_proof(SECRET, self.rank, message.nonce, b"mine")
                self.say(wire.Proof(self.rank, answer, b"mine"))
            elif self._last is not None and isinstance(message, wire.Welcome):
                self.say(self._last)
                self.end()
            else:
                self._on_message(message)

    # Where a process that stands still does not read. Replaced by it.
    do: Callable[[Callable[[], None]], None] = staticmethod(lambda action: action())

    def _to_process(self, part: bytes | None) -> None:
        self.do(lambda: self.read(part))

    def _to_head(self, part: bytes | None) -> None:
        self._at_head.arrived(part)
        self.control.on_news()


class SimulatedControl(SocketControlPlane):
    """The head's end, with nothing changed but its sockets."""

    def __init__(self, world: World, network: Network, num_ranks: int) -> None:
        self.world = world
        self.network = network
        self.on_news: Callable[[], None] = lambda: None
        self.is_up = True
        self.listener = Listener()
        listener: Any = self.listener
        super().__init__(listener, num_ranks, SECRET, selector=Selector(world), clock=lambda: world.now_ns)
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
