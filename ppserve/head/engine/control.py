"""The head's end of the control plane: the engine's interface to it, and its implementation with sockets.

All of it runs in the engine's thread, except `wake`. It never waits for a rank: what a socket does not take
follows later. Its only decision is which connections it accepts.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import ssl
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hmac import compare_digest
from typing import Any, Protocol

from ppserve import wire
from ppserve.errors import WireError
from ppserve.process.meeting import make_proof, new_nonce
from ppserve.process.network import is_of_this_user, prepare
from ppserve.process.tls import TlsConnection

log = logging.getLogger("ppserve.control")

# A stage measures before it connects, so its `Hello` comes at once.
_GREETING_TIMEOUT_S = 10.0
# Connections without a Hello beyond one a rank. A further one ends the oldest.
_MAX_STRANGERS = 16
# Without a free descriptor nothing is accepted, and the listener stays readable.
_ACCEPT_AGAIN_NS = 500_000_000
# Frames are smaller than a socket's buffer: so much unsent is not read.
_MAX_UNSENT_BYTES = wire.MAX_FRAME_BYTES


@dataclass(frozen=True, slots=True)
class Received:
    """A message from a rank."""

    rank: int
    arrived_ns: int  # on the head's monotonic clock
    message: wire.FromStage


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A rank's connection ended."""

    rank: int
    cause: str  # one word, a label of the metrics


class ControlPlane(Protocol):
    """One connection from each rank to the head, both ways. Its end is an event."""

    def poll(self, timeout_s: float) -> list[Received | Disconnected]:
        """Waits for messages and ends of connections, at most `timeout_s` or to a `wake`."""

    def wake(self) -> None:
        """Makes a `poll` in progress return. Safe in any thread."""

    def send(self, ranks: Iterable[int], message: wire.FromHead) -> None:
        """If a rank does not read any more, the next `poll` returns `Disconnected`."""

    def drop(self, rank: int, cause: str) -> None:
        """Ends a rank's connection: its stage exits, and its keeper starts another."""

    def close(self, goodbye_s: float) -> None:
        """Waits up to `goodbye_s` for ranks that were told to exit; then closes all."""


@dataclass(slots=True, eq=False)
class _Peer:
    """One connection."""

    connection: socket.socket
    reader: wire.FrameReader
    since_s: float = field(default_factory=time.monotonic)
    challenge: bytes = field(default_factory=new_nonce)  # what it must answer to
    rank: int | None = None  # None until it has proved to know the secret
    unsent: bytearray = field(default_factory=bytearray)  # what its socket has not taken yet

    @property
    def is_open(self) -> bool:
        return self.connection.fileno() >= 0


class SocketControlPlane:
    """The head's sockets: they accept connections from ranks, and exchange frames with them.

    A connection is a stranger's until its Hello proves to know the secret, and names a rank that is not connected.
    """

    def __init__(
        self,
        listener: socket.socket,
        world_size: int,
        secret: bytes,
        tls: ssl.SSLContext | None = None,
        greeting_timeout_s: float = _GREETING_TIMEOUT_S,
    ) -> None:
        self._greeting_timeout_s = greeting_timeout_s
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

    def show(self, tls: ssl.SSLContext) -> None:
        """New connections see this certificate. Safe in any thread."""
        self._tls = tls

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # the buffer is full of wakes, or everything is closed
            self._wake_in.send(b"\0")

    def put_back(self, events: Sequence[Received | Disconnected]) -> None:
        """The next `poll` returns these first."""
        self._arrived = [*events, *self._arrived]

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

    def drop(self, rank: int, cause: str) -> None:
        if (peer := self._peers.get(rank)) is not None:
            self._end(peer, cause)

    def close(self, goodbye_s: float) -> None:
        until_s = time.monotonic() + goodbye_s
        while self._peers and time.monotonic() < until_s:
            self.poll(0.1)
        for peer in (*self._strangers, *self._peers.values()):
            self._end(peer, "closed")
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
        """The connection is a stranger's, who must prove to know the secret."""
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # some systems refuse options of a connection that has ended
            prepare(connection)
        if self._tls is not None:
            connection = TlsConnection(connection, self._tls, serves=True)
        peer = _Peer(connection, wire.FrameReader(wire.Proof, wire.MAX_GREETING_BYTES))
        self._strangers[peer] = None
        self._selector.register(connection, selectors.EVENT_READ, peer)
        if len(self._strangers) > self._world_size + _MAX_STRANGERS:
            self._end(next(iter(self._strangers)), "too many")
        self._send_to(peer, wire.encode(wire.Challenge(peer.challenge)))

    def _end_silent_strangers(self) -> None:
        for peer in tuple(self._strangers):
            if time.monotonic() - peer.since_s > self._greeting_timeout_s:
                self._end(peer, "said nothing")

    def _read(self, peer: _Peer) -> None:
        if not peer.is_open:  # it was ended since it became readable
            return
        received = None
        try:
            received = peer.connection.recv(1 << 16 if peer.rank is not None else wire.MAX_GREETING_BYTES)
            self._handle_messages(peer, peer.reader.feed(received))
        except BlockingIOError:  # a part of something encrypted
            pass
        except WireError as error:
            log.warning("a message on the control plane does not fit the schema: %s", error)
            self._end(peer, "protocol")
        except OSError as error:
            received = b""
            if isinstance(error, ssl.SSLError):
                log.warning("refused a connection: %s", error.reason)
        self._send_to(peer, b"")
        if received == b"":
            self._end(peer, "exit")

    def _handle_messages(self, peer: _Peer, messages: list[Any]) -> None:
        arrived_ns = time.monotonic_ns()
        for message in messages:
            if isinstance(message, wire.Proof):
                self._check_proof(peer, message)
            elif peer not in self._strangers or self._admit(peer, message):
                assert peer.rank is not None
                self._arrived.append(Received(peer.rank, arrived_ns, message))
            if not peer.is_open:
                return

    def _send_to(self, peer: _Peer, frame: bytes) -> None:
        """Sends what the socket takes. An empty frame: only encryption's bytes."""
        if not peer.is_open:
            return
        try:
            peer.unsent += peer.connection.seal(frame) if isinstance(peer.connection, TlsConnection) else frame
            while peer.unsent:
                del peer.unsent[: peer.connection.send(peer.unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(peer, "protocol" if isinstance(error, ssl.SSLError) else "exit")
            return
        if len(peer.unsent) > _MAX_UNSENT_BYTES:
            self._end(peer, "timeout")
        else:
            self._select(peer)

    def _select(self, peer: _Peer) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        if events != self._selector.get_key(peer.connection).events:
            self._selector.modify(peer.connection, events, peer)

    def _end(self, peer: _Peer, cause: str) -> None:
        """Closes a connection, once. The rank is gone if this was its current one."""
        if not peer.is_open:
            return
        self._selector.unregister(peer.connection)
        peer.connection.close()
        self._strangers.pop(peer, None)
        if peer.rank is not None and self._peers.get(peer.rank) is peer:
            del self._peers[peer.rank]
            self._arrived.append(Disconnected(peer.rank, cause))

    # ---- who gets in ----

    def _check_proof(self, peer: _Peer, said: wire.Proof) -> None:
        """The head answers a stranger's proof with its own, or refuses."""
        expected = make_proof("rank", self._secret, said.rank, peer.challenge, said.nonce)
        if not compare_digest(said.proof, expected):
            self._refuse(peer, "the head has another secret than this stage")
        elif not 0 <= said.rank < self._world_size:
            self._refuse(peer, f"there is no rank {said.rank}")
        elif peer.rank is not None:
            self._refuse(peer, "a proof is sent once")
        elif said.rank in self._peers:
            # The end of its last process may be unread.
            self._refuse(peer, f"rank {said.rank} is connected already", may_retry=True)
        else:
            peer.rank = said.rank
            peer.reader = wire.FrameReader(wire.FromStage)
            answer = make_proof("head", self._secret, said.rank, peer.challenge, said.nonce)
            self._send_to(peer, wire.encode(wire.Welcome(answer)))

    def _admit(self, peer: _Peer, message: Any) -> bool:
        """Whether the first message is a greeting, of a rank not connected meanwhile."""
        assert peer.rank is not None
        is_stage = isinstance(message, wire.Hello) and message.rank == peer.rank
        if not (is_stage or isinstance(message, wire.Failed)) or peer.rank in self._peers:
            self._refuse(peer, "no greeting, or too late a one")
            return False
        del self._strangers[peer]
        if is_stage:
            self._peers[peer.rank] = peer
        else:
            self._end(peer, "a keeper has said what it had to say")
        return True

    def _refuse(self, peer: _Peer, reason: str, may_retry: bool = False) -> None:
        log.warning("refused a connection: %s", reason)
        self._send_to(peer, wire.encode(wire.Refused(reason, may_retry)))
        self._end(peer, "refused")
