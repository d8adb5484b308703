"""The head's end of the control plane: sockets, frames, and who may connect. No decisions are made here.

Runs in the engine's thread. `wake` is the one method that other threads may call.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import selectors
import socket
import time
from dataclasses import dataclass
from typing import Any

from ppserve import wire
from ppserve.errors import WireError

log = logging.getLogger("ppserve.control")

# A stage opens its checkpoint and measures before it connects, so it greets at once.
_GREETING_TIMEOUT_S = 10.0
# A frame is small against a socket's buffer: a send that blocks this long means nobody reads.
_SEND_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Heard:
    """A message from a stage; arrived_ns on the head's monotonic clock."""

    stage: int
    arrived_ns: int
    message: Any


@dataclass(frozen=True, slots=True)
class Gone:
    """A stage's connection ended. cause: one word, a label of the metrics."""

    stage: int
    cause: str


@dataclass(slots=True)
class _Peer:
    connection: socket.socket
    reader: wire.FrameReader
    since_s: float
    stage: int | None = None


class ControlPlane:
    """Listens for stages, cuts their bytes into messages, sends them frames.

    Strangers, who do not know the token, and stages of another pipeline are turned away.
    """

    def __init__(self, host: str, num_stages: int, token: str) -> None:
        self._num_stages = num_stages
        self._token = token.encode()
        self._listener = socket.create_server((host, 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._peers: dict[int, _Peer] = {}
        self._strangers: set[socket.socket] = set()
        self._lost: list[Gone] = []
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)

    def wake(self) -> None:
        """Makes a `poll` in progress return. Safe from any thread."""
        with contextlib.suppress(BlockingIOError):  # full of wakes: one more would say nothing new
            self._wake_in.send(b"\0")

    def poll(self, timeout_s: float) -> list[Heard | Gone]:
        """What stages said, or that they are gone, in order of arrival; empty after `timeout_s` or a wake."""
        heard: list[Heard | Gone] = []
        for key, _ in self._selector.select(timeout_s if not self._lost else 0):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_out:
                self._wake_out.recv(4096)
            else:
                heard += self._read(key.data)
        heard += self._lost
        self._lost = []
        self._turn_away_silent_strangers()
        return heard

    def send(self, stage: int, message: wire.FromHead) -> None:
        """Sends, or, where the stage does not read any more, reports it gone at the next `poll`."""
        self.send_frame(stage, wire.encode(message))

    def send_frame(self, stage: int, frame: bytes) -> None:
        """`send` for a frame that is encoded once and goes to several stages."""
        peer = self._peers.get(stage)
        if peer is None:
            return
        try:
            peer.connection.sendall(frame)
        except OSError as error:
            self.drop(stage, "timeout" if isinstance(error, TimeoutError) else "exit")

    def drop(self, stage: int, cause: str) -> None:
        """Cuts a stage off: its process ends when it sees that, and its keeper starts another."""
        peer = self._peers.get(stage)
        if peer is not None:
            self._lost.append(self._forget(peer, cause))

    def close(self, goodbye_s: float) -> None:
        """Waits for the stages, which were told to end, to hang up; then lets go of everything."""
        until_s = time.monotonic() + goodbye_s
        while self._peers and time.monotonic() < until_s:
            self.poll(0.1)
        for peer in list(self._peers.values()):
            self._forget(peer, "closed")
        for stranger in list(self._strangers):
            stranger.close()
        self._selector.close()
        self._listener.close()
        self._wake_in.close()
        self._wake_out.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.settimeout(_SEND_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = _Peer(connection, wire.FrameReader(wire.FromStage), time.monotonic())
        self._strangers.add(connection)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> list[Heard | Gone]:
        try:
            received = peer.connection.recv(1 << 16)
            arrived_ns = time.monotonic_ns()
            messages = peer.reader.feed(received)
        except OSError:
            received, messages = b"", []
        except WireError as error:
            log.warning("a peer of the control plane does not keep to the schema: %s", error)
            return self._end(peer, "protocol")
        if not received:
            return self._end(peer, "exit")
        heard: list[Heard | Gone] = []
        for message in messages:
            if peer.stage is None and not self._admit(peer, message, heard):
                return heard + self._end(peer, "not admitted")
            assert peer.stage is not None
            heard.append(Heard(peer.stage, arrived_ns, message))
        return heard

    def _admit(self, peer: _Peer, message: Any, heard: list[Heard | Gone]) -> bool:
        """Whether a connection's first message makes it a stage's. An older connection of it is gone."""
        if not isinstance(message, wire.Hello | wire.GaveUp):
            return False
        if not hmac.compare_digest(message.token.encode(), self._token):
            return False
        if not 0 <= message.stage < self._num_stages:
            return False
        before = self._peers.get(message.stage)
        if before is not None and isinstance(message, wire.Hello):
            heard.append(self._forget(before, "replaced"))
        peer.stage = message.stage
        self._strangers.discard(peer.connection)
        if isinstance(message, wire.Hello):
            self._peers[message.stage] = peer
        return True

    def _end(self, peer: _Peer, cause: str) -> list[Heard | Gone]:
        known = peer.stage is not None and self._peers.get(peer.stage) is peer
        gone = self._forget(peer, cause)
        return [gone] if known else []

    def _forget(self, peer: _Peer, cause: str) -> Gone:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        self._strangers.discard(peer.connection)
        if peer.stage is not None and self._peers.get(peer.stage) is peer:
            del self._peers[peer.stage]
        return Gone(-1 if peer.stage is None else peer.stage, cause)

    def _turn_away_silent_strangers(self) -> None:
        if not self._strangers:
            return
        now_s = time.monotonic()
        for key in list(self._selector.get_map().values()):
            peer = key.data
            if peer is not None and peer.stage is None and now_s - peer.since_s > _GREETING_TIMEOUT_S:
                self._forget(peer, "said nothing")
