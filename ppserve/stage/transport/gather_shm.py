"""The gather between processes of one host: anonymous memory that all tensor ranks of a stage have mapped.

The first rank makes the memory and hands it to the others over Unix sockets, which stay open and silent: the
kernel closes them when a rank dies, and a rank that waits looks at them. So the first rank learns of the end of
any other, and says so in the memory; the others learn of the first's.
"""

from __future__ import annotations

import mmap
import os
import socket

import torch
import torch.distributed as dist

from parallel_state import ParallelGroup
from ppserve.errors import TransportError
from ppserve.model.cpu.exchange import memory_bytes
from ppserve.stage.transport.gather import MemoryGather
from ppserve.stage.transport.shm import accept, dial, listen, no_name


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
        raise TransportError(f"shm: cannot connect to the tensor ranks of this stage: {error}") from error
    return MemoryGather(memory, (group.rank_in_group, group.world_size), connections)


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
