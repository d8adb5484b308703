"""Checkpoints: the architecture, and any tensor by its canonical name. Never a loaded model.

A format is one file (`hf`, `torch_save`, `llmc`) that lists its tensors as `StoredTensor`s. A family of models is
a table of canonical names (`tensor_shapes`) and one of config keys (`config_json`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from ppserve.core.architecture import Architecture

if TYPE_CHECKING:
    import torch


Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(arch: Architecture) -> Shapes:
    """Every canonical name with its shape. Linear weights are (out, in); a tied head is the embedding."""
    width, vocabulary = arch.width, arch.padded_vocab_size
    positions: Shapes = {"wpe.weight": (arch.max_positions, width)} if arch.rotary is None else {}
    return {
        "wte.weight": (vocabulary, width),
        **positions,
        **{f"h.{i}.{name}": shape for i in range(arch.num_layers) for name, shape in layer_shapes(arch).items()},
        **_with_biases({"ln_f": (width,)}, arch.biases),
        "lm_head.weight": (vocabulary, width),
    }


def layer_shapes(arch: Architecture) -> Shapes:
    """The tensors of one layer, without the `h.{i}.` in front, in the order in which they are used."""
    return LAYER_SHAPES[arch.family](arch)


def _gpt2_layer(arch: Architecture) -> Shapes:
    width, inner = arch.width, arch.inner_width
    weights = {
        "ln_1": (width,),
        "attn.c_attn": (3 * width, width),
        "attn.c_proj": (width, width),
        "ln_2": (width,),
        "mlp.c_fc": (inner, width),
        "mlp.c_proj": (width, inner),
    }
    return _with_biases(weights, arch.biases)


def _llama_layer(arch: Architecture) -> Shapes:
    width, inner, size = arch.width, arch.inner_width, arch.head_size
    queries, keys = arch.num_heads * size, arch.num_kv_heads * size
    qkv: Shapes = {"attn.q": (queries, width), "attn.k": (keys, width), "attn.v": (keys, width)}
    return {
        "ln_1.weight": (width,),
        **_with_biases(qkv, arch.qkv_biases),
        **({"attn.q_norm.weight": (size,), "attn.k_norm.weight": (size,)} if arch.qk_norms else {}),
        "attn.o.weight": (width, queries),
        "ln_2.weight": (width,),
        "mlp.gate.weight": (inner, width),
        "mlp.up.weight": (inner, width),
        "mlp.down.weight": (width, inner),
    }


LAYER_SHAPES: dict[str, Callable[[Architecture], Shapes]] = {"gpt2": _gpt2_layer, "llama": _llama_layer}
"""By `Architecture.family`."""


def _with_biases(weights: Shapes, have_biases: bool) -> Shapes:
    shapes: Shapes = {}
    for name, shape in weights.items():
        shapes[f"{name}.weight"] = shape
        if have_biases:
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


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


class FourBits(NamedTuple):
    """Weights of 4 bits in groups of 32 inputs: each is scale * number + minimum.

    numbers_nGi: from 0 to 15, uint8. scales_nG, minima_nG: float16.
    """

    numbers_nGi: torch.Tensor
    scales_nG: torch.Tensor
    minima_nG: torch.Tensor


class Matrix(Protocol):
    """A weight (N, K) that a backend packs: a tensor, or a part of a checkpoint that is read when it is sliced."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, outputs: slice, /) -> torch.Tensor: ...


@runtime_checkable
class StoresFourBits(Protocol):
    """A checkpoint that may hold weights of 4 bits."""

    def four_bits(self, name: str, rows: tuple[slice, ...]) -> FourBits | None:
        """These rows of a matrix as they are stored, None where it is stored otherwise. Raises CheckpointError."""


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
