"""What the model asks of a kind of device.

The model knows which tensors go through which operator in which order; a backend knows how. It owns the layout of
weights, keys and values in memory, and the arithmetic on them. `cpu` has kernels of its own; `stock` has torch's
operators, for GPUs and, on the CPU, as the oracle for the kernels.

T rows, D width, E = 3D, K inputs, N outputs, V vocabulary, R rows read out, S slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.core.plan import Drawn, Scored, StepPlan

Ints = NDArray[np.int64]

Operator = Callable[[torch.Tensor], torch.Tensor]
"""A norm or an activation, on contiguous rows in the computing dtype. An activation may work in place."""


@dataclass(frozen=True, slots=True)
class Precision:
    """How numbers are kept. weights: those of linear layers and the LM head; embeddings, biases and norms are
    kept as `hidden` or wider. kv: keys and values.

    compute: what operators take and give. hidden: what hidden states are rounded to after every attention and MLP,
    so that where the stages are cut changes nothing; in this form they cross to the next stage.
    """

    weights: torch.dtype
    kv: torch.dtype
    compute: torch.dtype
    hidden: torch.dtype


@dataclass(frozen=True, slots=True)
class StepRows:
    """Where the rows of a step stand: in their sequences, and in the KV blocks. On the host.

    slots_T: where a row's key and value go, as block * block_size + offset. first_row_S, num_rows_S, start_S: each
    slice's rows and the position of its first. tables, table_begin_S: all block tables one after the other, and
    where each slice's begins. copies: (source, destination) blocks, to copy first. highest_block: the greatest
    block id mentioned anywhere, -1 for none.
    """

    slots_T: Ints
    first_row_S: Ints
    num_rows_S: Ints
    start_S: Ints
    tables: Ints
    table_begin_S: Ints
    copies: tuple[tuple[int, int], ...]
    highest_block: int


class Linear(Protocol):
    """y = x Wᵀ + b. num_bytes: of the weight, as it is kept."""

    num_inputs: int
    num_outputs: int
    num_bytes: int

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """(T, K), contiguous → (T, N), a new tensor; both in the computing dtype."""


class Attend(Protocol):
    """The attention of one step, for any of a stage's layers."""

    def __call__(self, layer: int, qkv_TE: torch.Tensor, scale: float) -> torch.Tensor:
        """(T, D). Keeps the rows' keys and values, then attends to them and to all before them.

        layer: of those whose attention is on this stage, counted from 0. scale: the factor on Q·K.
        """


Sublayer = Callable[[torch.Tensor, Attend], torch.Tensor]
"""(T, D) hidden states to (T, D), as `Precision.hidden` has them: attention or MLP with the residual."""


class AttentionParts(Protocol):
    """What an attention sublayer is made of. own: its number among the stage's attentions."""

    own: int
    scale: float
    norm: Operator
    qkv: Linear
    proj: Linear


class MLPParts(Protocol):
    """What an MLP sublayer is made of."""

    norm: Operator
    expand: Linear
    activate: Operator
    contract: Linear


class KVCache(Protocol):
    """The keys and values of one stage: preallocated blocks, addressed by id, owned by nobody else.

    A block is written before it is read, so nothing is ever erased.
    """

    num_blocks: int
    block_size: int
    device: torch.device

    def attention(self, rows: StepRows) -> Attend:
        """Prepares a step. Reads and writes no block, so it can run ahead of the step before."""

    def begin(self, rows: StepRows) -> None:
        """The step begins: its copies are made."""

    def fill(self, value: float) -> None:
        """Sets every number in the cache."""

    def close(self) -> None:
        """Ends what runs beside it; the memory goes with the last reference."""


class Backend(Protocol):
    """A device in one precision."""

    device: torch.device
    precision: Precision

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """An embedding, a bias or a norm's weight: rounded as hidden states are, on the device."""

    def linear(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> Linear:
        """Packs a weight as the checkpoint has it, which can be released afterwards. bias_N: as `stored`."""

    def norm(self, weight_D: torch.Tensor, bias_D: torch.Tensor | None, epsilon: float) -> Operator:
        """A layer norm over D. weight_D, bias_D: as `stored`."""

    def activation(self, name: str) -> Operator:
        """One of `stock.ACTIVATIONS`."""

    def fused_attention(self, parts: AttentionParts) -> Sublayer | None:
        """The sublayer in one call, with the bits of its parts; None where the parts are as good."""

    def fused_mlp(self, parts: MLPParts) -> Sublayer | None:
        """Likewise."""

    def block_bytes(self, arch: Architecture, layout: StageLayout, block_size: int) -> int:
        """Bytes that one KV block takes on a stage."""

    def make_cache(
        self, arch: Architecture, layout: StageLayout, num_blocks: int, block_size: int, *, serves: bool = False
    ) -> KVCache:
        """serves: for a server that stays; it may have memory ready before blocks are used."""

    def read_logits(
        self, plan: StepPlan, pieces_RV: Iterator[torch.Tensor]
    ) -> tuple[tuple[Drawn, ...], tuple[Scored, ...]]:
        """Draws from and scores a plan's logits: float32 rows in the order of `StepInputs.read_rows`."""

    def synchronize(self) -> None:
        """Waits for the device, so that time stamps mean what they say."""

    def describe(self) -> str:
        """What it computes with. Where two stages' descriptions differ, so may their bits."""
