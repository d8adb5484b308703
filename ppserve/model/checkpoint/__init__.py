"""Checkpoints: the architecture, and any tensor by its canonical name. Never a loaded model.

Canonical names (global layer index i), linear weights always as (out, in), V' = padded_vocab_size:

    wte.weight (V', D)              wpe.weight (T, D)
    h.{i}.ln_1.weight|bias (D)      h.{i}.attn.c_attn.weight (3D, D) |bias    h.{i}.attn.c_proj.weight (D, D) |bias
    h.{i}.ln_2.weight|bias (D)      h.{i}.mlp.c_fc.weight (F, D) |bias        h.{i}.mlp.c_proj.weight (D, F) |bias
    ln_f.weight|bias (D)            lm_head.weight (V', D): the stored one, or wte when tied

A format is one file (`hf`, `torch_save`, `llmc`, `nanogpt`) that lists its tensors as `StoredTensor`s. A family of
models is a table of tensor names (`names`) and one of config keys (`config_json`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ppserve.core.architecture import Architecture

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The part of a tensor that a rank reads."""

    rows: tuple[slice, ...] | None = None
    """Ranges of the first dimension, which are concatenated; None for all of it."""
    columns: slice | None = None
    """A range of the last dimension; None for all of it."""

    def select(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of a tensor that is in memory."""
        import torch

        if self.rows is not None:
            tensor = torch.cat([tensor[rows] for rows in self.rows])
        return tensor if self.columns is None else tensor[..., self.columns]


WHOLE = TensorPart()


class Matrix(Protocol):
    """A weight (N, K) that a backend packs: a tensor, or a part of a checkpoint that is read when it is sliced."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, outputs: slice, /) -> torch.Tensor: ...


class Checkpoint(Protocol):
    """An opened checkpoint."""

    path: Path
    architecture: Architecture
    stored_dtype: str
    """`float32`, `bfloat16` or `float16`, as most weights are stored."""

    def tensor(self, name: str, part: TensorPart = WHOLE) -> torch.Tensor:
        """A part of one tensor on the CPU, in memory of its own; only this part of the file is read.

        Raises CheckpointError.
        """
        ...
