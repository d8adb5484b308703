"""A head's end of the control plane, polled by a thread, for tests of those who connect to it."""

from __future__ import annotations

import hashlib
import queue
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppserve import wire
from ppserve.config import NetworkSettings
from ppserve.head.engine.control_sockets import SocketControlPlane
from ppserve.process.network import connect, listen
from ppserve.process.tls import stage_context

SECRET = b"the secret of this server"
WITHIN_S = 20.0


@dataclass
class Head:
    endpoint: wire.HeadEndpoint
    control: SocketControlPlane
    _events: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    _due: queue.SimpleQueue[tuple[tuple[int], wire.FromHead]] = field(default_factory=queue.SimpleQueue)
    _over: threading.Event = field(default_factory=threading.Event)

    def next_event(self) -> Any:
        return self._events.get(timeout=WITHIN_S)

    def send(self, rank: int, message: wire.FromHead) -> None:
        self._due.put(((rank,), message))
        self.control.wake()

    def run(self) -> None:
        while not self._over.is_set():
            while not self._due.empty():
                self.control.send(*self._due.get())
            for event in self.control.poll(WITHIN_S):
                self._events.put(event)

    def end(self) -> None:
        self._over.set()
        self.control.wake()


def name_in(directory: Path, what: str) -> str:
    """An abstract socket's name. pytest's directories have too long names."""
    return f"@ppserve-test-{hashlib.sha256(f'{directory}/{what}'.encode()).hexdigest()}"


def place(directory: Path, secret: bytes = SECRET, tls: NetworkSettings | None = None) -> wire.HeadEndpoint:
    """Where a head may listen."""
    secret_file = directory / f"secret-{secret.hex()}"
    if not secret_file.exists():  # who reads it meanwhile must not see it empty
        secret_file.write_bytes(secret)
    return wire.HeadEndpoint(name_in(directory, "head"), secret_file, tls=tls)


@contextmanager
def head(
    directory: Path, secret: bytes = SECRET, num_ranks: int = 2, tls: NetworkSettings | None = None
) -> Iterator[Head]:
    """A head that listens in `directory`."""
    endpoint = place(directory, secret, tls)
    context = stage_context(tls, serves=True) if tls else None
    running = Head(endpoint, SocketControlPlane(listen(endpoint.address), num_ranks, secret, context))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    try:
        yield running
    finally:
        running.end()
        thread.join(WITHIN_S)
        running.control.close(0)


class Tap:
    """Stands between a rank and the head, passes everything on, and keeps it."""

    def __init__(self, directory: Path, beyond: str) -> None:
        self.address = name_in(directory, "tap")
        self.up, self.down = b"", b""
        self._beyond = beyond
        self._thread = threading.Thread(target=self._relay, args=(listen(self.address),), daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(WITHIN_S)

    def _relay(self, listener: socket.socket) -> None:
        with listener, listener.accept()[0] as rank, connect(self._beyond, WITHIN_S) as head:
            while True:
                readable, _, _ = select.select([rank, head], [], [])
                if rank in readable:
                    self.up += (said := rank.recv(4096))
                    head.sendall(said)
                    if not said:
                        return
                if head in readable:
                    self.down += (said := head.recv(4096))
                    rank.sendall(said)
