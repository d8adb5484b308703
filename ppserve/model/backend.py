"""What the model asks of a kind of device.

The model knows which tensors go through which operator in which order; a backend knows how. It owns the layout of
weights, keys and values in memory, and the arithmetic on them. `cpu` and `cuda` have kernels of their own; `stock`
has torch's operators, for what a backend has no kernel for.

T rows, D width, E = 3D, K inputs, N outputs, V vocabulary, R rows read out, S slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.core.architecture import Architecture, Cut, StageLayout
from ppserve.core.plan import Drawn, Scored, StepPlan
from ppserve.model.checkpoint import Matrix
from ppserve.model.gather import ALONE, Gather
from ppserve.model.timing import Timing

Ints = NDArray[np.int64]


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
    """A plan as arrays: where its rows stand in their sequences, and in the KV blocks. On the host.

    token_ids_T: empty but on the first stage. slots_T: where a row's key and value go, as block * block_size +
    offset. first_row_S, num_rows_S, start_S: each slice's rows and the position of its first. tables,
    table_begin_S: all block tables one after the other, and where each slice's begins. read_rows: the rows that go
    through the head: first those that are drawn from, in slice order, then those that are scored; empty but on the
    last stage.
    """

    plan: StepPlan
    token_ids_T: Ints
    positions_T: Ints
    slots_T: Ints
    first_row_S: Ints
    num_rows_S: Ints
    start_S: Ints
    tables: Ints
    table_begin_S: Ints
    read_rows: Ints


class Linear(Protocol):
    """y = x Wᵀ + b. num_bytes: of the weight, as it is kept."""

    num_inputs: int
    num_outputs: int
    num_bytes: int

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """(T, K), contiguous → (T, N), a new tensor; both in the computing dtype."""


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """The weights of a layer norm over D numbers, as `Backend.stored` gives them."""

    weight_D: torch.Tensor
    bias_D: torch.Tensor | None
    epsilon: float


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """What an attention sublayer is made of."""

    number: int
    """Among the attentions of the stage, from 0."""
    scale: float
    """The factor on Q·K."""
    norm: LayerNorm
    qkv: Linear
    proj: Linear
    heads: Cut
    """The outputs of all heads, as tensor ranks share them."""
    columns: Cut
    """The hidden states, as tensor ranks share them."""


@dataclass(frozen=True, slots=True)
class MLPWeights:
    """What an MLP sublayer is made of."""

    norm: LayerNorm
    expand: Linear
    activation: str
    contract: Linear
    inner: Cut
    """The outputs of `expand`, as tensor ranks share them."""
    columns: Cut
    """The hidden states, as tensor ranks share them."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What all layers of a stage share in one step. Rows are the slices' tokens one after the other.

    A cache's own subclass adds what its backend needs to attend.
    """

    rows: StepRows
    token_ids_T: torch.Tensor
    """As in `rows`, on the stage's device; the next two likewise."""
    positions_T: torch.Tensor
    read_rows_R: torch.Tensor
    gather: Gather = field(default=ALONE, kw_only=True)
    """To the other tensor ranks of the stage."""

    @property
    def num_rows(self) -> int:
        return len(self.rows.slots_T)


Sublayer = Callable[[torch.Tensor, StepInputs], torch.Tensor]
"""(T, D) hidden states x to x + attention(norm(x)) or x + mlp(norm(x)), both as `Precision.hidden`."""

Head = Callable[[torch.Tensor], torch.Tensor]
"""(R, D) hidden states to float32 logits (R, v) of the rank's own ids."""


class KVCache(Protocol):
    """The keys and values of one stage: preallocated blocks, addressed by id, and owned by it alone.

    A block is written before it is read, so nothing is ever erased.
    """

    num_blocks: int
    block_size: int
    device: torch.device

    def inputs(self, rows: StepRows) -> StepInputs:
        """Prepares a step. Reads and writes no block, so it can run ahead of the step before."""

    def fill(self, value: float) -> None:
        """Sets every number in the cache."""


Results = tuple[tuple[Drawn, ...], tuple[Scored, ...]]

Reading = Callable[[], Results]
"""Waits for what a step draws and scores; the device was given all work for it before."""


class StageModel(Protocol):
    """What computes a stage's steps: a `GPT2Stage`, or one whose work was recorded."""

    arch: Architecture
    layout: StageLayout
    backend: Backend

    def forward(self, inputs: StepInputs, hidden_TD: torch.Tensor | None) -> torch.Tensor:
        """(T, D) hidden states after this stage's sublayers. hidden_TD: those of the stage before, None on the
        first. Writes the rows' keys and values to the cache for which the inputs were built."""

    def read_out(self, inputs: StepInputs, hidden_TD: torch.Tensor) -> Reading:
        """Draw and score what the plan asks for; no row, no head. Last stage only."""


class Backend(Protocol):
    """A device in one precision. read_rows_at_once: rows of logits that are in memory at a time. more_rows,
    more_head_rows: for the self-test, numbers of rows above 128 that a linear layer and the LM head may be given,
    where kernels may be chosen by that number; ascending."""

    device: torch.device
    precision: Precision
    read_rows_at_once: int
    more_rows: tuple[int, ...]
    more_head_rows: tuple[int, ...]

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """An embedding, a bias or a norm's weight: rounded as hidden states are, on the device."""

    def linear(self, weight_NK: Matrix, bias_N: torch.Tensor | None) -> Linear:
        """Packs a weight as the checkpoint has it, which can be released afterwards. bias_N: as `stored`."""

    def attention(self, weights: AttentionWeights) -> Sublayer:
        """x + proj(attend(qkv(norm(x)))). It keeps the rows' keys and values in the step's cache."""

    def mlp(self, weights: MLPWeights) -> Sublayer:
        """x + contract(activation(expand(norm(x)))). Raises KeyError unless `ACTIVATIONS` has the activation."""

    def head(self, norm: LayerNorm, linear: Linear) -> Head:
        """linear(norm(x))."""

    def block_bytes(self, arch: Architecture, layout: StageLayout, block_size: int) -> int:
        """Bytes that one KV block takes on a rank."""

    def make_cache(
        self, arch: Architecture, layout: StageLayout, num_blocks: int, block_size: int, *, populate: bool = False
    ) -> KVCache:
        """populate: its memory is taken from the system now, not when a block is first written."""

    def recorded(self, model: StageModel, cache: KVCache) -> StageModel:
        """The model with what a server computes all the time recorded, if this device can; else the model.

        The cache is written to. Takes seconds.
        """

    def read_logits(self, inputs: StepInputs, pieces_Rv: Iterator[torch.Tensor], vocabulary: Cut) -> Reading:
        """Draws from and scores a step's logits: float32 rows in the order of `StepRows.read_rows`, of this rank's
        own ids. Of several tensor ranks the first has the results."""

    def timing(self) -> Timing:
        """A step's computation begins now."""

    def describe(self) -> str:
        """What it computes with. Where two stages' descriptions differ, so may their bits."""
