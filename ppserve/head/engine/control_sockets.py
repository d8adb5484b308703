"""The control plane between processes: the head's sockets, and the frames that they carry.

All of it runs in the engine's thread, except `wake` and `use_certificate`. It never waits for a rank: what a
socket does not accept follows later. Who is let in is decided by `handshake`.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import ssl
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ppserve import wire
from ppserve.errors import WireError
from ppserve.head.engine.control import Disconnected, LossCause, Received
from ppserve.head.engine.handshake import Handshake
from ppserve.process.network import is_of_this_user, prepare
from ppserve.process.tls import TlsConnection

log = logging.getLogger("ppserve.control")

# A stage measures before it connects, so its `Hello` comes at once.
_HANDSHAKE_TIMEOUT_S = 10.0
# So many connections may wait for their Hello beside one of each rank. A further one ends the oldest.
_MAX_STRANGERS = 16
# Without a free descriptor nothing is accepted, and the listener stays readable.
_ACCEPT_AGAIN_NS = 500_000_000
# Frames are smaller than a socket's buffer. A rank with so many unsent bytes does not read any more.
_MAX_UNSENT_BYTES = wire.MAX_FRAME_BYTES


@dataclass(slots=True, eq=False)
class _Peer:
    """One connection."""

    connection: socket.socket
    handshake: Handshake
    reader: wire.FrameReader = field(
        default_factory=lambda: wire.FrameReader(wire.Proof, wire.MAX_HANDSHAKE_BYTES)
    )
    since_s: float = field(default_factory=time.monotonic)
    unsent: bytearray = field(default_factory=bytearray)  # what its socket has not taken yet

    @property
    def rank(self) -> int | None:
        """The rank that it has proved to be; None before that."""
        return self.handshake.rank

    @property
    def is_open(self) -> bool:
        return self.connection.fileno() >= 0


class SocketControlPlane:
    """The head's sockets: they accept connections from ranks, and exchange frames with them.

    A connection is a stranger's until `handshake` lets it in.
    """

    def __init__(
        self,
        listener: socket.socket,
        world_size: int,
        secret: bytes,
        tls: ssl.SSLContext | None = None,
        handshake_timeout_s: float = _HANDSHAKE_TIMEOUT_S,
    ) -> None:
        self._handshake_timeout_s = handshake_timeout_s
        self._world_size = world_size
        self._secret = secret
        self._tls = tls
        self._listener = listener
        self._accepts_from_ns = 0
        self._peers: dict[int, _Peer] = {}
        self._strangers: dict[_Peer, None] = {}  # in order of arrival
        self._arrived: list[Received | Disconnected] = []  # since the last poll
        self._wake_in, self._wake_out = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for own in (self._listener, self._wake_out):
            self._selector.register(own, selectors.EVENT_READ, None)
        for own in (self._listener, self._wake_in, self._wake_out):
            own.setblocking(False)

    def use_certificate(self, tls: ssl.SSLContext) -> None:
        """Show this certificate to new connections. Safe in any thread."""
        self._tls = tls

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # the buffer is full of wakes, or everything is closed
            self._wake_in.send(b"\0")

    def poll(self, timeout_s: float) -> list[Received | Disconnected]:
        for key, mask in self._selector.select(timeout_s if not self._arrived else 0):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_out:
                self._wake_out.recv(4096)
            else:
                if mask & selectors.EVENT_WRITE:
                    self._send_to(key.data, b"")
                if mask & selectors.EVENT_READ:
                    self._read(key.data)
        self._end_silent_strangers()
        self._accept_again()
        arrived, self._arrived = self._arrived, []
        return arrived

    def send(self, ranks: Iterable[int], message: wire.FromHead) -> None:
        frame = wire.encode(message)
        for rank in ranks:
            if (peer := self._peers.get(rank)) is not None:
                self._send_to(peer, frame)

    def drop(self, rank: int, cause: LossCause) -> None:
        if (peer := self._peers.get(rank)) is not None:
            self._end(peer, cause)

    def close(self, goodbye_s: float) -> None:
        until_s = time.monotonic() + goodbye_s
        while self._peers and time.monotonic() < until_s:
            self.poll(0.1)
        for peer in (*self._strangers, *self._peers.values()):
            self._close(peer)
        self._peers.clear()
        for each in (self._selector, self._listener, self._wake_in, self._wake_out):
            each.close()

    # ---- connections ----

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            log.warning("cannot accept a connection: %s", error.strerror)
            self._selector.unregister(self._listener)
            self._accepts_from_ns = time.monotonic_ns() + _ACCEPT_AGAIN_NS
        else:
            if is_of_this_user(connection):
                self._challenge(connection)
            else:
                log.warning("refused a connection of another user")
                connection.close()

    def _accept_again(self) -> None:
        if self._accepts_from_ns and time.monotonic_ns() > self._accepts_from_ns:
            self._accepts_from_ns = 0
            self._selector.register(self._listener, selectors.EVENT_READ, None)

    def _challenge(self, connection: socket.socket) -> None:
        """Begin a connection: it is a stranger's, who must prove to know the secret."""
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # some systems refuse options of a connection that has ended
            prepare(connection)
        if self._tls is not None:
            connection = TlsConnection(connection, self._tls, serves=True)
        peer = _Peer(connection, Handshake(self._secret, self._world_size))
        self._strangers[peer] = None
        self._selector.register(connection, selectors.EVENT_READ, peer)
        if len(self._strangers) > self._world_size + _MAX_STRANGERS:
            self._close(next(iter(self._strangers)))
        self._send_to(peer, wire.encode(peer.handshake.challenge))

    def _end_silent_strangers(self) -> None:
        for peer in tuple(self._strangers):
            if time.monotonic() - peer.since_s > self._handshake_timeout_s:
                self._close(peer)

    def _read(self, peer: _Peer) -> None:
        if not peer.is_open:  # it was ended since it became readable
            return
        received = None
        try:
            received = peer.connection.recv(1 << 16 if peer.rank is not None else wire.MAX_HANDSHAKE_BYTES)
            self._handle_messages(peer, peer.reader.feed(received))
        except BlockingIOError:  # only a part of an encrypted record has come
            pass
        except WireError as error:
            log.warning("a message on the control plane does not fit the schema: %s", error)
            self._end(peer, LossCause.PROTOCOL)
        except OSError as error:
            received = b""
            if isinstance(error, ssl.SSLError):
                log.warning("refused a connection: %s", error.reason)
        self._send_to(peer, b"")
        if received == b"":
            self._end(peer, LossCause.EXIT)

    def _handle_messages(self, peer: _Peer, messages: list[Any]) -> None:
        arrived_ns = time.monotonic_ns()
        for message in messages:
            if peer in self._strangers:
                self._continue_handshake(peer, message, arrived_ns)
            else:
                assert peer.rank is not None
                self._arrived.append(Received(peer.rank, arrived_ns, message))
            if not peer.is_open:
                return

    def _send_to(self, peer: _Peer, frame: bytes) -> None:
        """Queue a frame and send what the socket accepts; b"" sends queued frames and pending TLS records."""
        if not peer.is_open:
            return
        try:
            peer.unsent += peer.connection.seal(frame) if isinstance(peer.connection, TlsConnection) else frame
            while peer.unsent:
                del peer.unsent[: peer.connection.send(peer.unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(peer, LossCause.PROTOCOL if isinstance(error, ssl.SSLError) else LossCause.EXIT)
            return
        if len(peer.unsent) > _MAX_UNSENT_BYTES:
            self._end(peer, LossCause.TIMEOUT)
        else:
            self._select(peer)

    def _select(self, peer: _Peer) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        if events != self._selector.get_key(peer.connection).events:
            self._selector.modify(peer.connection, events, peer)

    def _end(self, peer: _Peer, cause: LossCause) -> None:
        """Close a connection, once. If it was its rank's, the rank is lost."""
        if not peer.is_open:
            return
        self._close(peer)
        if peer.rank is not None and self._peers.get(peer.rank) is peer:
            del self._peers[peer.rank]
            self._arrived.append(Disconnected(peer.rank, cause))

    def _close(self, peer: _Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        self._strangers.pop(peer, None)

    # ---- who gets in ----

    def _continue_handshake(self, peer: _Peer, message: wire.Proof | wire.FromStage, arrived_ns: int) -> None:
        """Answer a stranger's message, and make it a rank's connection when its handshake is complete."""
        answer = peer.handshake.answer(message, self._peers)
        if isinstance(answer, wire.Refused):
            log.warning("refused a connection: %s", answer.reason)
            self._send_to(peer, wire.encode(answer))
            if peer.is_open:
                self._close(peer)
        elif isinstance(answer, wire.Welcome):
            peer.reader = wire.FrameReader(wire.FromStage)
            self._send_to(peer, wire.encode(answer))
        else:
            assert peer.rank is not None
            assert not isinstance(message, wire.Proof)
            self._arrived.append(Received(peer.rank, arrived_ns, message))
            if isinstance(message, wire.Failed):
                self._close(peer)  # a keeper's only message
            else:
                del self._strangers[peer]
                self._peers[peer.rank] = peer
