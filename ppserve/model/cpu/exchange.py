"""The exchange of rows through memory that the tensor ranks of a stage share, as one of them sees it."""

from __future__ import annotations

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
    """Size of the memory that ranks share."""
    return (num_ranks + 1) * LINE_BYTES + num_ranks * 2 * BUFFER_BYTES


class MemoryExchange:
    """One rank's side of the exchange. Used by one thread, except `end`."""

    most_bytes = BUFFER_BYTES
    """Of a rank's rows at a time."""

    def __init__(self, memory: torch.Tensor, place: tuple[int, int], signs_of_end: Sequence[int] = ()) -> None:
        """memory: `memory_bytes` bytes, zeros at first. place: this rank, and how many there are. signs_of_end:
        descriptors of files that can be read when a rank is gone; open until `forget_signs`."""
        count = place[1]
        self._memory = memory  # kept: the kernels have its address
        self._over = memory.numpy()[count * LINE_BYTES :][:8].view(np.int64)
        signs = b"".join(struct.pack("ihh", descriptor, POLLIN, 0) for descriptor in signs_of_end)
        self._signs = np.frombuffer(signs or bytes(8), np.uint8).copy()
        self._side = side = aligned(kernels.NUM_FIELDS, np.int64)
        self._address = address(side)
        lines = memory.data_ptr()
        side[[kernels.LINES, kernels.BUFFERS]] = lines, lines + (count + 1) * LINE_BYTES
        side[[kernels.RANK, kernels.NUM_RANKS]] = place
        side[[kernels.SIGNS, kernels.NUM_SIGNS]] = address(self._signs), len(signs_of_end)

    @property
    def waited_ns(self) -> int:
        return int(self._side[kernels.WAITED_NS])

    def swap(self, own_Tn: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Rows of all ranks. own_Tn: contiguous, at most `most_bytes`. Raises TransportError."""
        whole_TN = torch.empty(len(own_Tn), cut.size, dtype=own_Tn.dtype)
        widths = np.array(cut.widths, np.int64)
        rows = own_Tn.data_ptr(), own_Tn.nbytes, address(widths), own_Tn.itemsize, len(own_Tn)
        kernels.exchange(self._address, *rows, whole_TN.data_ptr())
        if self._side[kernels.IS_LOST]:
            raise TransportError("a tensor rank of this stage is gone")
        return whole_TN

    def end(self) -> None:
        """Ends all waits, this rank's and the others', within some milliseconds."""
        self._over[0] = 1

    def forget_signs(self) -> None:
        """Their files are about to be closed."""
        self._side[kernels.NUM_SIGNS] = 0
