"""Slices of rows between the tensor ranks of a stage: a transport of its own kind, to `model.gather.Gather`.

    local   threads of one process: shared memory of that process
    shm     processes of one host (Linux): the same in anonymous memory that they share
    gloo    processes anywhere
    nccl    one GPU per rank

T rows, N columns, n those of one rank.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

from ppserve.core.cut import Cut
from ppserve.errors import TransportError
from ppserve.model.cpu.kernels.exchange import LINE_BYTES, await_ranks, put, take
from ppserve.model.gather import ALONE, Gather

BUFFER_BYTES = 4 << 20
"""What a rank has at a time; more rows follow in further pieces."""
_SLEEP_S = 50e-6


class TensorLink(Gather, Protocol):
    """A stage's gather for one epoch. Used by one thread, except `interrupt`. After a TransportError only `close`
    is of use."""

    @property
    def name(self) -> str: ...

    def interrupt(self) -> None:
        """Called from another thread: this wait and all later ones end with TransportError. `close` is still due.
        Does nothing after `close`."""

    def close(self) -> None:
        """Ends the waits of the other ranks as well. May be called twice."""


class NoTensorLink:
    """To nobody: of a rank that is its whole stage, or that computes as if it were."""

    name = "none"
    waited_ns = 0

    def __init__(self, gather: Gather = ALONE) -> None:
        self.all = gather.all

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


def memory_bytes(num_ranks: int) -> int:
    """Size of the memory that ranks share: for each a counter, then for each two buffers."""
    return num_ranks * (LINE_BYTES + 2 * BUFFER_BYTES)


class Company:
    """What a rank can learn of the others while it waits for them. Threads of one process share one of these."""

    def __init__(self) -> None:
        self._is_over = False

    def look(self) -> None:
        """Raises TransportError where waiting is of no use; else lets a moment pass."""
        if self._is_over:
            raise TransportError("a tensor rank of this stage is gone")
        time.sleep(_SLEEP_S)

    def end(self) -> None:
        """Ends this rank's waits and the others'."""
        self._is_over = True

    def close(self) -> None:
        self.end()


class MemoryGather:
    """Rows are put into shared memory, and a number says that they are there: put-with-signal, without a copy but
    the reader's.

    A wait spins for some microseconds, without the interpreter's lock, then sleeps and looks whether it still
    makes sense. The two buffers of a rank take turns: nobody is more than one exchange ahead, so the buffer before
    the last has been read by all.
    """

    def __init__(self, name: str, memory: torch.Tensor, place: tuple[int, int], company: Company) -> None:
        """memory: `memory_bytes` bytes, zeros at first. place: this rank, and how many there are."""
        self.name = name
        self.waited_ns = 0
        self._memory, self._company = memory, company
        self._rank, self._count = place
        self._step = 0
        self._width_bytes: dict[tuple[tuple[int, ...], int], torch.Tensor] = {}

    def all(self, own_Tn: torch.Tensor, cut: Cut) -> torch.Tensor:
        rows_at_once = BUFFER_BYTES // (max(cut.widths) * own_Tn.itemsize)
        assert rows_at_once, f"a row of {max(cut.widths)} numbers does not fit"
        if len(own_Tn) <= rows_at_once:
            return self._exchange(own_Tn, cut)
        return torch.cat([self._exchange(piece, cut) for piece in torch.split(own_Tn, rows_at_once)])

    def interrupt(self) -> None:
        self._company.end()

    def close(self) -> None:
        self._company.close()

    def _exchange(self, own_Tn: torch.Tensor, cut: Cut) -> torch.Tensor:
        self._step += 1
        own_Tn, device = own_Tn.cpu().contiguous(), own_Tn.device
        whole_TN = torch.empty(len(own_Tn), cut.size, dtype=own_Tn.dtype)
        board = self._memory.data_ptr()
        buffers = board + self._count * LINE_BYTES + self._step % 2 * BUFFER_BYTES
        put(board, self._rank, buffers + 2 * BUFFER_BYTES * self._rank, own_Tn.data_ptr(), own_Tn.nbytes)
        begun_ns = time.monotonic_ns()
        while not await_ranks(board, self._count, self._step):
            self._company.look()
        self.waited_ns += time.monotonic_ns() - begun_ns
        widths = self._widths(cut, own_Tn.itemsize).data_ptr()
        take(buffers, 2 * BUFFER_BYTES, widths, self._count, len(own_Tn), whole_TN.data_ptr())
        return whole_TN.to(device)

    def _widths(self, cut: Cut, element_bytes: int) -> torch.Tensor:
        """Bytes that each rank has of a row, kept for ever."""
        key = cut.widths, element_bytes
        if key not in self._width_bytes:
            self._width_bytes[key] = torch.tensor([width * element_bytes for width in cut.widths])
        return self._width_bytes[key]


def connect_ranks(count: int) -> tuple[MemoryGather, ...]:
    """The tensor ranks of one stage, for threads of this process."""
    memory, company = torch.zeros(memory_bytes(count), dtype=torch.uint8), Company()
    return tuple(MemoryGather("local", memory, (rank, count), company) for rank in range(count))
