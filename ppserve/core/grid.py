"""The arithmetic of ranks: how a world of processes is divided into tensor ranks, replicas and stages.

The order is Megatron-LM's: tensor ranks vary fastest, then replicas (its data axis), then stages. In a world of
tensor x data x pipeline ranks, the number of a rank is

    r = tensor + T * (data + D * pipeline)        T, D: sizes of the tensor and data axes
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank sits: its replica, its stage, and which of the stage's tensor ranks it is."""

    replica: int
    stage: int
    tensor: int


@dataclass(frozen=True, slots=True)
class RankGrid:
    """A grid of tensor x data x pipeline ranks. Megatron-LM calls the axis of replicas `data`."""

    tensor: int
    data: int
    pipeline: int

    @property
    def size(self) -> int:
        return self.tensor * self.data * self.pipeline

    def place(self, rank: int) -> RankPlace:
        assert 0 <= rank < self.size, rank
        replica, stage = rank // self.tensor % self.data, rank // (self.tensor * self.data)
        return RankPlace(replica, stage, rank % self.tensor)

    def ranks_of(self, replica: int) -> tuple[int, ...]:
        """Return the ranks of one replica, in order of stages, then of tensor ranks."""
        return tuple(rank for rank in range(self.size) if self.place(rank).replica == replica)

    def name(self, rank: int) -> str:
        """Return the rank's name in logs, such as `replica 0 stage 1 tensor 0`; axes of size 1 are omitted."""
        place = self.place(rank)
        words = [f"stage {place.stage}"]
        if self.data > 1:
            words.insert(0, f"replica {place.replica}")
        if self.tensor > 1:
            words.append(f"tensor {place.tensor}")
        return " ".join(words)
