"""The head's end of the control plane: the interface that the engine uses, and its implementation with sockets.

Everything runs in the engine's thread, except `wake`, which any thread may call. The only decision here is which
connections are accepted.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import selectors
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from ppserve import wire
from ppserve.errors import WireError

log = logging.getLogger("ppserve.control")

# A stage opens its checkpoint and measures before it connects, so it sends `Hello` at once.
_GREETING_TIMEOUT_S = 10.0
# Frames are much smaller than a socket's buffer, so a send that blocks this long means that the stage does not
# read.
_SEND_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Heard:
    """A message from a rank; arrived_ns on the head's monotonic clock."""

    rank: int
    arrived_ns: int
    message: wire.FromStage


@dataclass(frozen=True, slots=True)
class Gone:
    """A rank's connection ended. cause: one word, a label of the metrics."""

    rank: int
    cause: str


class ControlPlane(Protocol):
    """One connection from each rank to the head, for messages both ways. Its end is an event."""

    def poll(self, timeout_s: float) -> list[Heard | Gone]:
        """Waits for messages from ranks and for ends of connections. Empty after `timeout_s` or a `wake`."""

    def wake(self) -> None:
        """Makes a `poll` in progress return. Safe in any thread."""

    def send(self, rank: int, message: wire.FromHead) -> None:
        """Sends. If the rank does not read any more, the next `poll` returns its `Gone`."""

    def broadcast(self, ranks: Iterable[int], message: wire.FromHead) -> None:
        """`send` to several ranks; the message is encoded once."""

    def drop(self, rank: int, cause: str) -> None:
        """Ends a rank's connection. Its stage process then exits, and its keeper starts another."""

    def close(self, goodbye_s: float) -> None:
        """Waits up to `goodbye_s` for the ranks, which were told to exit, to close their ends; then closes all."""


@dataclass(slots=True, eq=False)
class _Peer:
    """One connection. rank: None until its greeting was accepted."""

    connection: socket.socket
    reader: wire.FrameReader
    since_s: float
    rank: int | None = None


class SocketControlPlane:
    """Accepts connections from ranks, and exchanges frames with them.

    A connection whose first message lacks the secret token, or names a rank that does not exist, is refused.
    """

    def __init__(
        self,
        host: str,
        world_size: int,
        token: str,
        greeting_timeout_s: float = _GREETING_TIMEOUT_S,
        send_timeout_s: float = _SEND_TIMEOUT_S,
    ) -> None:
        self._greeting_timeout_s = greeting_timeout_s
        self._send_timeout_s = send_timeout_s
        self._world_size = world_size
        self._token = token.encode()
        self._listener = socket.create_server((host, 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._peers: dict[int, _Peer] = {}
        self._strangers: set[_Peer] = set()
        self._lost: list[Heard | Gone] = []
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # unread wakes fill the buffer, or everything is closed
            self._wake_in.send(b"\0")

    def poll(self, timeout_s: float) -> list[Heard | Gone]:
        heard: list[Heard | Gone] = []
        for key, _ in self._selector.select(timeout_s if not self._lost else 0):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_out:
                self._wake_out.recv(4096)
            elif key.data.connection.fileno() >= 0:  # else a new connection of its rank has just replaced it
                heard += self._read(key.data)
        heard += self._lost
        self._lost = []
        self._refuse_silent_strangers()
        return heard

    def send(self, rank: int, message: wire.FromHead) -> None:
        self._send_frame(rank, wire.encode(message))

    def broadcast(self, ranks: Iterable[int], message: wire.FromHead) -> None:
        frame = wire.encode(message)
        for rank in ranks:
            self._send_frame(rank, frame)

    def _send_frame(self, rank: int, frame: bytes) -> None:
        peer = self._peers.get(rank)
        if peer is None:
            return
        try:
            peer.connection.sendall(frame)
        except OSError as error:
            self.drop(rank, "timeout" if isinstance(error, TimeoutError) else "exit")

    def drop(self, rank: int, cause: str) -> None:
        peer = self._peers.get(rank)
        if peer is not None:
            self._lost += self._end(peer, cause)

    def close(self, goodbye_s: float) -> None:
        until_s = time.monotonic() + goodbye_s
        while self._peers and time.monotonic() < until_s:
            self.poll(0.1)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Peer):
                self._end(key.data, "closed")
        self._selector.close()
        self._listener.close()
        self._wake_in.close()
        self._wake_out.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.settimeout(self._send_timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = _Peer(connection, wire.FrameReader(wire.FromStage), time.monotonic())
        self._strangers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> list[Heard | Gone]:
        try:
            received = peer.connection.recv(1 << 16)
            arrived_ns = time.monotonic_ns()
            messages = peer.reader.feed(received)
        except OSError:
            received, messages = b"", []
        except WireError as error:
            log.warning("a message on the control plane does not fit the schema: %s", error)
            return self._end(peer, "protocol")
        if not received:
            return self._end(peer, "exit")
        heard: list[Heard | Gone] = []
        for message in messages:
            if peer.rank is None and not self._admit(peer, message, heard):
                return heard + self._end(peer, "not admitted")
            assert peer.rank is not None
            heard.append(Heard(peer.rank, arrived_ns, message))
        return heard

    def _admit(self, peer: _Peer, message: Any, heard: list[Heard | Gone]) -> bool:
        """Whether a connection is accepted after its first message. Ends an older connection of the rank."""
        if not isinstance(message, wire.Hello | wire.GaveUp):
            return False
        if not hmac.compare_digest(message.token.encode(), self._token):
            return False
        if not 0 <= message.rank < self._world_size:
            return False
        before = self._peers.get(message.rank)
        if before is not None and isinstance(message, wire.Hello):
            heard += self._end(before, "replaced")
        peer.rank = message.rank
        self._strangers.discard(peer)
        if isinstance(message, wire.Hello):
            self._peers[message.rank] = peer
        return True

    def _end(self, peer: _Peer, cause: str) -> list[Heard | Gone]:
        """Closes a connection. Its rank is gone, unless the connection was not the rank's current one."""
        self._selector.unregister(peer.connection)
        peer.connection.close()
        self._strangers.discard(peer)
        if peer.rank is None or self._peers.get(peer.rank) is not peer:
            return []
        del self._peers[peer.rank]
        return [Gone(peer.rank, cause)]

    def _refuse_silent_strangers(self) -> None:
        silent_since_s = time.monotonic() - self._greeting_timeout_s
        for peer in [stranger for stranger in self._strangers if stranger.since_s < silent_since_s]:
            self._end(peer, "said nothing")
