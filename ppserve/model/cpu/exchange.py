"""One tensor rank's side of the exchange of rows through shared memory (`kernels.exchange`).

T rows, N columns, n those of one rank.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from select import POLLIN

import numpy as np
import torch

from ppserve.core.architecture import Cut
from ppserve.errors import TransportError
from ppserve.model.cpu.kernels import exchange as kernels
from ppserve.model.cpu.kernels.exchange import BUFFER_BYTES, LINE_BYTES
from ppserve.model.cpu.kernels.memory import address, aligned


def memory_bytes(num_ranks: int) -> int:
    """Return how many bytes of memory so many ranks share."""
    return (num_ranks + 1) * LINE_BYTES + num_ranks * 2 * BUFFER_BYTES


class MemoryGather:
    """A `Gather` through shared memory: a rank puts its rows there, then counts up a number (put-with-signal). It
    is used by one thread, apart from `interrupt`."""

    def __init__(
        self, memory: torch.Tensor, rank: int, num_ranks: int, connections: Sequence[socket.socket] = ()
    ) -> None:
        """memory: `memory_bytes(num_ranks)` bytes, zeros at first. connections: to the other ranks, where these
        are processes; the system closes a connection when the other process dies."""
        self._memory = memory  # kept: the kernels have its address
        self._connections = connections
        self._over = memory.numpy()[num_ranks * LINE_BYTES :][:8].view(np.int64)
        signs = b"".join(struct.pack("ihh", connection.fileno(), POLLIN, 0) for connection in connections)
        self._signs = np.frombuffer(signs or bytes(8), np.uint8).copy()
        self._side = side = aligned(kernels.NUM_FIELDS, np.int64)
        self._address = address(side)
        lines = memory.data_ptr()
        side[[kernels.LINES, kernels.BUFFERS]] = lines, lines + (num_ranks + 1) * LINE_BYTES
        side[[kernels.RANK, kernels.NUM_RANKS]] = rank, num_ranks
        side[[kernels.SIGNS, kernels.NUM_SIGNS]] = address(self._signs), len(connections)

    @property
    def waited_ns(self) -> int:
        return int(self._side[kernels.WAITED_NS])

    def all(self, own_Tn: torch.Tensor, cut: Cut) -> torch.Tensor:
        rows_at_once = BUFFER_BYTES // (max(cut.widths) * own_Tn.itemsize)
        assert rows_at_once, f"a row of {max(cut.widths)} numbers does not fit"
        parts = torch.split(own_Tn.cpu().contiguous(), rows_at_once)
        wholes = [self._exchange(part_Tn, cut) for part_Tn in parts]
        return (torch.cat(wholes) if len(wholes) > 1 else wholes[0]).to(own_Tn.device)

    def interrupt(self) -> None:
        """End all waits, this rank's and the others', within some milliseconds."""
        self._over[0] = 1

    def close(self) -> None:
        self.interrupt()
        self._side[kernels.NUM_SIGNS] = 0
        for connection in self._connections:
            connection.close()

    def _exchange(self, own_Tn: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Return all ranks' columns of some rows. own_Tn: this rank's; they fit into a buffer."""
        whole_TN = torch.empty(len(own_Tn), cut.size, dtype=own_Tn.dtype)
        widths = np.array(cut.widths, np.int64)
        own, whole = own_Tn.data_ptr(), whole_TN.data_ptr()
        kernels.exchange(self._address, own, len(own_Tn), own_Tn.itemsize, address(widths), whole)
        if self._side[kernels.IS_LOST]:
            raise TransportError("a tensor rank of this stage is gone")
        return whole_TN
