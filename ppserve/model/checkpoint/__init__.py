"""Checkpoints: the architecture, and any tensor by its canonical name. Never a loaded model.

A format has one file here (`hf`, `gguf`, `torch_save`, `llmc`), which lists a checkpoint's tensors as
`StoredTensor`s. A family has one file here (`gpt2`, `llama`), with the names of its tensors and the keys of its
config; `families` lists them.
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
"""All of a tensor."""


class FourBits(NamedTuple):
    """Weights of 4 bits, in groups of 32 inputs: a weight is its group's scale * number + minimum.

    numbers_nGi: uint8, from 0 to 15. scales_nG, minima_nG: float16.
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
        """Return these outputs as they are stored; None unless all of them are stored in 4 bits."""


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
    """`int4` if the file has most of its weights in the form of `FourBits`, else `none`."""

    def tensor(self, name: str, part: TensorPart = WHOLE) -> torch.Tensor:
        """Read a part of one tensor into new memory on the CPU. Raises CheckpointError."""

    def four_bits(self, name: str, rows: tuple[slice, ...]) -> FourBits | None:
        """Return these rows of a matrix as they are stored; None if they are not stored in 4 bits. Raises
        CheckpointError."""
        return None
