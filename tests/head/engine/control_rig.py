"""The head's sockets and the other ends of its connections, for tests of the control plane."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from ppserve import wire
from ppserve.core.architecture import Architecture
from ppserve.head.engine.control import Disconnected, Received, SocketControlPlane
from ppserve.process.proof import head_proof, rank_proof
from tests.hellos import hello as hello_of

ARCH = Architecture(4, 64, 4, 128, 300, 300, 256)
SECRET = b"the secret of this server"
WITHIN_S = 20.0
AGES_S = 3600.0
# Of the sockets' buffers: systems differ, and let them grow to many megabytes.
_SMALL = 1 << 18
Events = list[Received | Disconnected]


class Plane(SocketControlPlane):
    """The head's end, on a free port of this host. It has two ranks."""

    def __init__(self, **settings: Any) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SMALL)
        self.port = listener.getsockname()[1]
        super().__init__(listener, 2, SECRET, **settings)


class Rank:
    """The other end of a connection, whoever that may be."""

    def __init__(self, control: Plane) -> None:
        self.connection = socket.create_connection(("127.0.0.1", control.port), timeout=WITHIN_S)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL)
        self._reader = wire.FrameReader(wire.FromHead)
        while not self._is_readable():
            control.poll(0.01)
        (self.challenge,) = self.hear()

    def _is_readable(self) -> bool:
        return bool(select.select([self.connection], [], [], 0)[0])

    def say(self, *messages: wire.Outgoing) -> None:
        self.connection.sendall(b"".join(map(wire.encode, messages)))

    def proof(self, rank: int, secret: bytes = SECRET) -> wire.Proof:
        """What is right to answer to the head's challenge."""
        return wire.Proof(rank, rank_proof(secret, rank, self.challenge.nonce, b"mine"), b"mine")

    def prove(self, control: Plane, rank: int) -> Rank:
        """Up to the head's Welcome."""
        self.say(self.proof(rank))
        while not self._is_readable():
            control.poll(0.01)
        assert self.hear() == [wire.Welcome(head_proof(SECRET, rank, self.challenge.nonce, b"mine"))]
        return self

    def hear(self) -> list[Any]:
        """Messages that arrived; waits for one. None at all when the head has hung up."""
        messages: list[Any] = []
        while not messages:
            received = self.connection.recv(1 << 16)
            if not received:
                break
            messages = self._reader.feed(received)
        return messages

    def hear_all(self, number: int) -> list[Any]:
        """As `hear`, until so many have come."""
        messages: list[Any] = []
        while len(messages) < number:
            messages += self.hear()
        return messages

    @property
    def is_cut_off(self) -> bool:
        """Whether nothing comes but, perhaps, a refusal."""
        try:
            return all(isinstance(message, wire.Refused) for message in self.hear()) and self.hear() == []
        except ConnectionResetError:  # what it had said was not read
            return True


def hello(rank: int) -> wire.Hello:
    return hello_of(rank, 2, ARCH)


@contextmanager
def listening(**settings: Any) -> Iterator[Plane]:
    control = Plane(**settings)
    try:
        yield control
    finally:
        control.close(0)


@contextmanager
def greeted(control: Plane, rank: int) -> Iterator[Rank]:
    with proven(control, rank) as peer:
        peer.say(hello(rank))
        until(control, lambda events: [event.rank for event in events if isinstance(event, Received)] == [rank])
        yield peer


@contextmanager
def proven(control: Plane, rank: int) -> Iterator[Rank]:
    with connected(control) as peer:
        yield peer.prove(control, rank)


@contextmanager
def connected(control: Plane) -> Iterator[Rank]:
    peer = Rank(control)
    with closing(peer.connection):
        yield peer


def until(control: Plane, condition: Callable[[Events], bool]) -> Events:
    """What the head receives, until the condition holds."""
    events: Events = []
    deadline_s = time.monotonic() + WITHIN_S
    while not condition(events):
        assert time.monotonic() < deadline_s, events
        events += control.poll(0.1)
    return events


def told(events: Events) -> list[tuple[int, object]]:
    """Without times: (rank, message or cause)."""
    return [(event.rank, event.message if isinstance(event, Received) else event.cause) for event in events]


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def has_ended(thread: threading.Thread) -> bool:
    thread.join(WITHIN_S)
    return not thread.is_alive()
