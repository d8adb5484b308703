"""Checkpoints: the architecture, and any tensor by its canonical name. Never a loaded model.

Canonical names (global layer index i), linear weights always as (out, in), V' = padded_vocab_size:

    wte.weight (V', D)              wpe.weight (T, D)
    h.{i}.ln_1.weight|bias (D)      h.{i}.attn.c_attn.weight (3D, D) |bias    h.{i}.attn.c_proj.weight (D, D) |bias
    h.{i}.ln_2.weight|bias (D)      h.{i}.mlp.c_fc.weight (F, D) |bias        h.{i}.mlp.c_proj.weight (D, F) |bias
    ln_f.weight|bias (D)            lm_head.weight (V', D): the stored one, or wte when tied

Opening reads headers only; `tensor` reads one tensor, or a part of it, from the file and keeps no copy.
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
class Part:
    """Some of a tensor. rows: ranges of its first dimension, which are put together. columns: one of the last.
    None is all of them."""

    rows: tuple[slice, ...] | None = None
    columns: slice | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of a tensor that is in memory."""
        import torch

        if self.rows is not None:
            tensor = torch.cat([tensor[rows] for rows in self.rows])
        return tensor if self.columns is None else tensor[..., self.columns]


WHOLE = Part()


class Matrix(Protocol):
    """A weight (N, K) as the checkpoint has it: a tensor, or outputs that are read when they are asked for."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, outputs: slice, /) -> torch.Tensor: ...


class Checkpoint(Protocol):
    """An opened checkpoint. stored_dtype: `float32`, `bfloat16` or `float16`, as most weights are stored."""

    path: Path
    architecture: Architecture
    stored_dtype: str

    def tensor(self, name: str, part: Part = WHOLE) -> torch.Tensor:
        """One tensor on the CPU in its stored dtype, shape checked; only this part is ever in memory, but for a
        piece of the file. Raises CheckpointError."""
        ...
