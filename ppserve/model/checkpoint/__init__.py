"""Checkpoints: the architecture, and any tensor by its canonical name. Never a loaded model.

A format is one file (`hf`, `gguf`, `torch_save`, `llmc`) that lists its tensors as `StoredTensor`s.
A family is one file (`gpt2`, `llama`) with its tensors' names and its config's keys, listed in `families`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ppserve.core.architecture import Architecture

if TYPE_CHECKING:
    import torch


Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The part of a tensor that a rank reads."""

    rows: tuple[slice, ...] | None = None
    """Ranges of the first dimension, which are concatenated; None for all of it."""
    columns: slice | None = None
    """A range of the last dimension; None for all of it."""

    def select(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this part of a tensor that is in memory."""
        import torch

        if self.rows is not None:
            tensor = torch.cat([tensor[rows] for rows in self.rows])
        return tensor if self.columns is None else tensor[..., self.columns]


WHOLE = TensorPart()


class FourBits(NamedTuple):
    """Weights of 4 bits in groups of 32 inputs: each is scale * number + minimum.

    numbers_nGi: from 0 to 15, uint8. scales_nG, minima_nG: float16.
    """

    numbers_nGi: torch.Tensor
    scales_nG: torch.Tensor
    minima_nG: torch.Tensor


class Matrix(Protocol):
    """A weight (N, K) that a backend packs: one in memory, or a part of a checkpoint that is read when it is
    sliced."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, outputs: slice, /) -> torch.Tensor: ...

    def four_bits(self, outputs: slice) -> FourBits | None:
        """Return these outputs as they are stored; None unless all have 4 bits."""


class MatrixInMemory:
    """A tensor as a `Matrix`."""

    def __init__(self, weight_NK: torch.Tensor) -> None:
        self.shape = weight_NK.shape
        self._weight_NK = weight_NK

    def __getitem__(self, outputs: slice, /) -> torch.Tensor:
        return self._weight_NK[outputs]

    def four_bits(self, outputs: slice) -> FourBits | None:
        return None


class Checkpoint(Protocol):
    """An opened checkpoint."""

    path: Path
    architecture: Architecture
    stored_dtype: str
    """The type in which most weights are stored: `float32`, `bfloat16` or `float16`."""
    stored_quantization: str = "none"
    """`int4` where the file has most weights in the 4 bits in which CPUs compute, and else `none`."""

    def tensor(self, name: str, part: TensorPart = WHOLE) -> torch.Tensor:
        """Read a part of one tensor to the CPU, into memory of its own. Raises CheckpointError."""

    def four_bits(self, name: str, rows: tuple[slice, ...]) -> FourBits | None:
        """Return these rows of a matrix as they are stored; None where that is not in 4 bits. Raises
        CheckpointError."""
        return None
