"""The gather between processes of one host: anonymous memory that all tensor ranks of a stage have mapped.

The first rank makes the memory and hands it to the others over Unix sockets, which stay open and silent: the
kernel closes them when a rank dies, and whoever waits looks at them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket

import torch
import torch.distributed as dist

from parallel_state import ParallelGroup
from ppserve.errors import TransportError
from ppserve.stage.transport.gather import Company, MemoryGather, memory_bytes
from ppserve.stage.transport.shm import accept, dial, hang_up, listen, no_name


class Processes(Company):
    """The others are processes. The first rank is connected to all, each of the others to the first: when one is
    gone, the first ends its own wait and closes its connections, which ends those of the rest."""

    def __init__(self, connections: list[socket.socket]) -> None:
        super().__init__()
        self._connections = connections
        self._signs_of_end = select.poll()
        for connection in connections:
            self._signs_of_end.register(connection, select.POLLIN)

    def look(self) -> None:
        if self._signs_of_end.poll(0):
            self.end()
        super().look()

    def end(self) -> None:
        super().end()
        for connection in self._connections:
            hang_up(connection)

    def close(self) -> None:
        self.end()
        for connection in self._connections:
            with contextlib.suppress(KeyError, ValueError):
                self._signs_of_end.unregister(connection)
            connection.close()


def shm_gather(group: ParallelGroup) -> MemoryGather:
    """Collective. Raises TransportError."""
    size = memory_bytes(group.world_size)
    connections: list[socket.socket] = []
    try:
        descriptor = _hand_out(group, size, connections) if group.is_first_rank else _fetch(group, connections)
        try:
            memory = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        finally:
            os.close(descriptor)
    except (OSError, RuntimeError) as error:
        for connection in connections:
            connection.close()
        raise TransportError(f"shm: cannot meet the tensor ranks of this stage: {error}") from error
    return MemoryGather("shm", memory, (group.rank_in_group, group.world_size), Processes(connections))


def _hand_out(group: ParallelGroup, size: int, connections: list[socket.socket]) -> int:
    """The descriptor of the memory, which all others get too."""
    listener, name = listen(group.world_size)
    with listener:
        dist.broadcast(name, group.first_rank, group=group.process_group)
        descriptor = os.memfd_create("ppserve-gather")
        try:
            os.ftruncate(descriptor, size)
            for _ in range(group.world_size - 1):
                connections.append(accept(listener))
                socket.send_fds(connections[-1], [b"\0"], [descriptor])
        except OSError:
            os.close(descriptor)
            raise
    return descriptor


def _fetch(group: ParallelGroup, connections: list[socket.socket]) -> int:
    name = no_name()
    dist.broadcast(name, group.first_rank, group=group.process_group)
    connections.append(dial(name))
    _, descriptors, _, _ = socket.recv_fds(connections[0], 1, 1)
    if not descriptors:
        raise TransportError("shm: the first tensor rank is gone")
    return descriptors[0]
