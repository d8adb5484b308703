"""Slices of rows between the tensor ranks of a stage: a transport of its own kind, to `model.gather.Gather`.

    local   threads of one process: shared memory of that process
    shm     processes of one host (Linux): the same in anonymous memory that they share
    gloo    processes anywhere
    nccl    one GPU per rank

T rows, N columns, n those of one rank.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol

import torch

from ppserve.core.architecture import Cut
from ppserve.model.cpu.exchange import MemoryExchange, memory_bytes
from ppserve.model.gather import ALONE, ECHO, Gather


class TensorLink(Gather, Protocol):
    """A stage's gather for one epoch. Used by one thread, except `interrupt`. After a TransportError only `close`
    is of use."""

    def interrupt(self) -> None:
        """Called from another thread: this wait and all later ones end with TransportError. `close` is still due.
        Does nothing after `close`."""

    def close(self) -> None:
        """Ends the waits of the other ranks as well. May be called twice."""


class NoTensorLink:
    """The link of a rank that is its whole stage, or that computes as if it were."""

    waited_ns = 0

    def __init__(self, gather: Gather = ALONE) -> None:
        self.all = gather.all

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


class MemoryGather(MemoryExchange):
    """A gather through shared memory: rows are put there, and a number says that they are (put-with-signal). Only
    the reader copies."""

    def __init__(
        self, memory: torch.Tensor, place: tuple[int, int], connections: Sequence[socket.socket] = ()
    ) -> None:
        """memory: `memory_bytes` bytes, zeros at first. place: this rank, and how many there are. connections: to
        other ranks; the kernel closes them when those die."""
        super().__init__(memory, place, [connection.fileno() for connection in connections])
        self._connections = connections

    def all(self, own_Tn: torch.Tensor, cut: Cut) -> torch.Tensor:
        rows_at_once = self.most_bytes // (max(cut.widths) * own_Tn.itemsize)
        assert rows_at_once, f"a row of {max(cut.widths)} numbers does not fit"
        pieces = torch.split(own_Tn.cpu().contiguous(), rows_at_once)
        wholes = [self.swap(piece_Tn, cut) for piece_Tn in pieces]
        return (torch.cat(wholes) if len(wholes) > 1 else wholes[0]).to(own_Tn.device)

    def interrupt(self) -> None:
        self.end()

    def close(self) -> None:
        self.end()
        self.forget_signs()
        for connection in self._connections:
            connection.close()


def pretend_ranks(count: int) -> TensorLink:
    """One rank alone, which never waits for the others: for trying and measuring what it computes itself."""
    return NoTensorLink(ALONE if count == 1 else ECHO)


def connect_ranks(count: int) -> tuple[MemoryGather, ...]:
    """The tensor ranks of one stage, for threads of this process."""
    memory = torch.zeros(memory_bytes(count), dtype=torch.uint8)
    return tuple(MemoryGather(memory, (rank, count)) for rank in range(count))
