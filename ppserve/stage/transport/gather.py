"""The gathers by which the tensor ranks of a stage exchange columns (`model.inputs.Gather`).

    local   threads of one process: through the memory of that process
    shm     processes of one host (Linux): through anonymous memory that they share
    gloo    processes anywhere
    nccl    ranks with a GPU each

With shm, the first rank makes the memory, and hands it to the others over Unix sockets. The kernel closes these
when a rank dies, and a rank that waits looks at them. So the first rank learns of the end of any other rank, and
notes it in the memory; the others learn of the end of the first one.

T rows, N columns, n those of one rank.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from typing import Protocol

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from ppserve.core.architecture import Cut
from ppserve.errors import TransportError
from ppserve.model.cpu.exchange import MemoryGather, memory_bytes
from ppserve.model.inputs import Alone, Gather
from ppserve.stage.parallel_state import ParallelGroup
from ppserve.stage.transport.point_to_point import GroupBackend, GroupUser
from ppserve.stage.transport.shm import accept, dial, listen, no_name


class StageGather(Gather, Protocol):
    """A stage's gather for one epoch, for one thread. After a TransportError only `close` may be called."""

    def interrupt(self) -> None:
        """End all waits with TransportError. Another thread may call this, until `close`, which must still be
        called."""

    def close(self) -> None:
        """End the other ranks' waits. It may be called twice."""


class NoGather(Alone):
    """The gather of a rank that is the only one of its stage, or computes as if it were."""

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


class GroupGather(GroupUser):
    """A gather over a group of torch.distributed.

    waited_ns: with gloo, it includes the exchange itself; with NCCL it is 0, because the GPU waits and not the
    host.

    The group's all-gather takes parts of equal size, so narrower ones are padded. gloo does not know all of
    torch's types, so bytes are gathered.
    """

    def __init__(self, name: str, group: ParallelGroup, backend: GroupBackend) -> None:
        super().__init__(name, group, backend)
        self.waited_ns = 0
        self._on_device = name == "nccl"

    def all(self, own_Tn: torch.Tensor, cut: Cut) -> torch.Tensor:
        of_host_Tn = own_Tn if self._on_device else own_Tn.cpu()
        begun_ns = time.monotonic_ns()  # this rank's own work is done, so from here on it waits
        padded = pad(of_host_Tn, (0, max(cut.widths) - cut.width)).contiguous()
        parts = [torch.empty_like(padded) for _ in cut.widths]
        with self._exchange():
            dist.all_gather(
                [part.view(torch.uint8) for part in parts], padded.view(torch.uint8), self._group.process_group
            )
        self._check_open()
        if not self._on_device:
            self.waited_ns += time.monotonic_ns() - begun_ns
        whole_TN = torch.cat([part[:, :width] for part, width in zip(parts, cut.widths, strict=True)], 1)
        return whole_TN.to(own_Tn.device)


def connect_ranks(count: int) -> tuple[StageGather, ...]:
    """Connect the tensor ranks of one stage that are threads of this process."""
    if count == 1:
        return (NoGather(),)
    memory = torch.zeros(memory_bytes(count), dtype=torch.uint8)
    return tuple(MemoryGather(memory, rank, count) for rank in range(count))


def connect_shared_memory(group: ParallelGroup) -> StageGather:
    """Connect the tensor ranks of one stage that are processes of one host. All of them must call this. Raises
    TransportError."""
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
    return MemoryGather(memory, group.rank_in_group, group.world_size, connections)


def _hand_out(group: ParallelGroup, size: int, connections: list[socket.socket]) -> int:
    """Make the memory, and hand it to the other ranks. Return its descriptor."""
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
