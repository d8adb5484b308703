"""Hidden states between processes of one host, which are put into memory that both sides see.

The sender writes a frame into the next of `depth` slots, and signals that with one byte on a Unix socket. The
receiver reads the frame in place, and gives the slot back with one byte. This is NVSHMEM's put-with-signal for
CPUs: only the sender copies, and a wait neither spins nor polls.

When a neighbour dies, the kernel closes the socket. Nothing has a name that could outlive its users: the memory is
anonymous (memfd), and its descriptor is sent over the socket, whose random name is in Linux's abstract namespace.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ppserve.core.plan import StepPlan
from ppserve.errors import TransportError
from ppserve.process.network import is_of_this_user
from ppserve.stage.parallel_state import ParallelGroup
from ppserve.stage.transport.frames import Frames, ReceiveOrder

_MEET_TIMEOUT_S = 20.0
_TOKEN_BYTES = 16


class _Slots:
    """`depth` buffers (max_rows, D) in memory that both ends of a connection share. They are used in turn.

    The memory is sparse: only the parts that frames have filled take memory.
    """

    def __init__(self, frames: Frames, descriptor: int) -> None:
        elements = frames.max_rows * frames.width
        self._segment = mmap.mmap(descriptor, self.num_bytes(frames))
        self._slots = [
            torch.frombuffer(
                self._segment, dtype=frames.dtype, count=elements, offset=i * elements * frames.dtype.itemsize
            ).view(frames.max_rows, frames.width)
            for i in range(frames.depth)
        ]
        self._next = 0

    @staticmethod
    def num_bytes(frames: Frames) -> int:
        return frames.depth * frames.max_rows * frames.width * frames.dtype.itemsize

    def next_slot(self, rows: int) -> torch.Tensor:
        slot_TD = self._slots[self._next][:rows]
        self._next = (self._next + 1) % len(self._slots)
        return slot_TD


class _Outgoing:
    """The sender's end of a connection."""

    def __init__(self, frames: Frames, connection: socket.socket) -> None:
        descriptor = os.memfd_create("ppserve-hidden-states")
        try:
            os.ftruncate(descriptor, _Slots.num_bytes(frames))
            socket.send_fds(connection, [b"\0"], [descriptor])
            self._slots = _Slots(frames, descriptor)
        finally:
            os.close(descriptor)
        self.connection = connection
        self._occupied = 0
        self._depth = frames.depth

    def send(self, hidden_TD: torch.Tensor) -> None:
        while self._occupied == self._depth:
            self._occupied -= _receive_bytes(self.connection, "next")
        self._slots.next_slot(hidden_TD.shape[0]).copy_(hidden_TD)
        self.connection.sendall(b"\0")
        self._occupied += 1


class _Incoming:
    """The receiver's end of a connection."""

    def __init__(self, frames: Frames, connection: socket.socket) -> None:
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        if not descriptors:
            raise TransportError("shm: the previous stage is gone")
        try:
            self._slots = _Slots(frames, descriptors[0])
        finally:
            os.close(descriptors[0])
        connection.settimeout(None)
        self.connection = connection
        self._arrived = 0

    def receive(self, rows: int) -> torch.Tensor:
        """Wait for the next frame, and return it. The sender may overwrite it after `give_back`."""
        while self._arrived == 0:
            self._arrived += _receive_bytes(self.connection, "previous")
        self._arrived -= 1
        return self._slots.next_slot(rows)

    def give_back(self) -> None:
        self.connection.sendall(b"\0")


class SharedMemoryTransport:
    """A `Transport` between processes of one host. All stages must make theirs together."""

    def __init__(self, frames: Frames, group: ParallelGroup) -> None:
        self._frames = frames
        self._order = ReceiveOrder()
        self._outgoing: _Outgoing | None = None
        self._incoming: _Incoming | None = None
        self._reading = False
        self._closed = False
        try:
            self._connect(group)
        except (OSError, RuntimeError) as error:
            self.close()
            raise TransportError(f"shm: cannot connect to the neighbours: {error}") from error

    def post_receive(self, plan: StepPlan) -> None:
        """Note the order. There is nothing to prepare: frames are put where they will be read."""
        assert self._incoming is not None, "the first stage receives nothing"
        self._frames.check(plan)
        self._order.post(plan)

    def receive(self, plan: StepPlan) -> torch.Tensor:
        assert self._incoming is not None, "the first stage receives nothing"
        self._order.check_next(plan)
        return self._receive(self._incoming, self._frames.check(plan))

    def send(self, plan: StepPlan, hidden_TD: torch.Tensor) -> int:
        assert self._outgoing is not None, "the last stage sends nothing"
        self._frames.check(plan, hidden_TD)
        with self._exchange():
            self._outgoing.send(hidden_TD)
        return hidden_TD.nbytes

    def warm_up(self) -> None:
        frames = self._frames
        if self._outgoing is not None:
            with self._exchange():
                self._outgoing.send(torch.zeros(1, frames.width, dtype=frames.dtype, device=frames.device))
        if self._incoming is not None:
            self._receive(self._incoming, 1)

    def interrupt(self) -> None:
        self._closed = True
        for end in (self._incoming, self._outgoing):
            if end is not None:
                hang_up(end.connection)

    def close(self) -> None:
        """Close both connections, which wakes both ends of each. The memory is freed with the last view of it."""
        self.interrupt()
        for end in (self._incoming, self._outgoing):
            if end is not None:
                end.connection.close()

    def _connect(self, group: ParallelGroup) -> None:
        """Send the names of sockets from stage to stage, then connect to the neighbours."""
        with contextlib.ExitStack() as opened:
            listener = None
            if group.next_rank is not None:
                listener, name = listen()
                opened.enter_context(listener)
                dist.send(name, group.next_rank, group=group.process_group)
            if group.prev_rank is not None:
                name = no_name()
                dist.recv(name, group.prev_rank, group=group.process_group)
                self._incoming = _Incoming(self._frames, dial(name))
            if listener is not None:
                self._outgoing = _Outgoing(self._frames, accept(listener))

    def _receive(self, incoming: _Incoming, rows: int) -> torch.Tensor:
        with self._exchange():
            if self._reading:
                self._reading = False
                incoming.give_back()
            slot_TD = incoming.receive(rows)
        self._reading = True
        return slot_TD.to(self._frames.device)

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[None]:
        if self._closed:
            raise TransportError("shm: the transport is closed")
        try:
            yield
        except OSError as error:
            raise TransportError(f"shm: a neighbour is gone: {error}") from error


def listen(backlog: int = 1) -> tuple[socket.socket, torch.Tensor]:
    """Listen on a socket with a random name. Return the socket and the name."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    listener = socket.socket(socket.AF_UNIX)
    listener.settimeout(_MEET_TIMEOUT_S)
    listener.bind(_address(token))
    listener.listen(backlog)
    return listener, torch.frombuffer(bytearray(token), dtype=torch.uint8)


def no_name() -> torch.Tensor:
    """Return a tensor into which a name is received."""
    return torch.empty(_TOKEN_BYTES, dtype=torch.uint8)


def dial(name: torch.Tensor) -> socket.socket:
    """Connect to the socket with this name."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_MEET_TIMEOUT_S)
    connection.connect(_address(bytes(name.tolist())))
    return connection


def accept(listener: socket.socket) -> socket.socket:
    """Accept the next connection of this user."""
    while True:
        connection, _ = listener.accept()
        if is_of_this_user(connection):
            return connection
        connection.close()


def _address(token: bytes) -> bytes:
    return b"\0ppserve-" + token.hex().encode()


def _receive_bytes(connection: socket.socket, neighbour: str) -> int:
    """Wait for signals of one byte each, and return how many have arrived."""
    count = len(connection.recv(64))
    if count == 0:
        raise TransportError(f"shm: the {neighbour} stage is gone")
    return count


def hang_up(connection: socket.socket) -> None:
    """Wake a thread that waits for this connection, which close() would not do. The connection's owner still
    closes it."""
    with contextlib.suppress(OSError):  # the neighbour or the owner has ended it already
        connection.shutdown(socket.SHUT_RDWR)
