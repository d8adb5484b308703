"""What the model asks of a kind of device.

The model knows which tensors go through which operator in which order; a backend knows how. It owns the layout of
weights, keys and values in memory, and the arithmetic. `cpu` and `cuda` have own kernels; `stock` has torch's
operators, for all else.

T rows, D width, E = 3D, K inputs, N outputs, V vocabulary, R rows read out, S slices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ppserve.core.architecture import Architecture, Cut, StageLayout
from ppserve.core.layers import AttentionSpec, MLPSpec
from ppserve.core.plan import Drawn, Scored
from ppserve.model.checkpoint import Matrix
from ppserve.model.inputs import KVCache, StepInputs

INT4: torch.dtype = getattr(torch, "int4")  # noqa: B009 (torch has it, its stubs do not)


@dataclass(frozen=True, slots=True)
class Precision:
    """How numbers are kept. weights: linear layers'; embeddings, biases and norms are kept as `hidden` or wider.
    kv: keys and values.

    compute: what operators take and give.
    hidden: what hidden states are rounded to after every attention and MLP, wherever stages are cut.
    """

    weights: torch.dtype
    kv: torch.dtype
    compute: torch.dtype
    hidden: torch.dtype

    @property
    def head(self) -> torch.dtype:
        """The LM head's weights: the most sensitive layer has at least 8 bits."""
        return torch.int8 if self.weights == INT4 else self.weights


class Linear(Protocol):
    """y = x Wᵀ + b. num_bytes: the weight's, as it is kept."""

    num_inputs: int
    num_outputs: int
    num_bytes: int

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """(T, K), contiguous → (T, N), a new tensor; both in the computing dtype."""


@dataclass(frozen=True, slots=True)
class NormWeights:
    """The weights of a norm over D numbers, by `Backend.stored`."""

    weight_D: torch.Tensor
    bias_D: torch.Tensor | None
    epsilon: float
    is_rms: bool = False  # leaves the mean where it is


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """What an attention sublayer is made of."""

    number: int  # among the attentions of the stage, from 0
    spec: AttentionSpec
    rotary: int | None  # the number of its rotary positions in `Architecture.rotaries`
    qkv: Linear  # queries, then keys, then values of the rank's heads
    proj: Linear
    heads: Cut  # the outputs of all heads, as tensor ranks share them
    columns: Cut  # the hidden states, as tensor ranks share them
    head_norms: tuple[NormWeights, NormWeights] | None = None
    """Each head's queries' and keys', before they are rotated by their positions."""


@dataclass(frozen=True, slots=True)
class MLPWeights:
    """What an MLP sublayer is made of."""

    spec: MLPSpec
    expand: Linear  # of a gated MLP, what is activated, then what it is multiplied with
    contract: Linear
    inner: Cut  # the inputs of `contract`, as tensor ranks share them
    columns: Cut  # the hidden states, as tensor ranks share them


@dataclass(frozen=True, slots=True)
class ResidualWeights:
    """What a residual line is made of: x + multiplier * post_norm(of(pre_norm(x)))."""

    pre_norm: NormWeights | None
    of: AttentionWeights | MLPWeights
    post_norm: NormWeights | None
    multiplier: float


Sublayer = Callable[[torch.Tensor, StepInputs], torch.Tensor]
"""(T, D), contiguous, to (T, D). An attention or an MLP takes normed rows and gives what is added to the hidden
states, both in `Precision.compute`. A block takes and gives the hidden states, in `Precision.hidden`."""

Operator = Callable[[torch.Tensor], torch.Tensor]
"""A norm or an activation of rows."""

Head = Callable[[torch.Tensor], torch.Tensor]
"""(R, D) hidden states to float32 logits (R, v) of the rank's ids, until the next call."""

Results = tuple[tuple[Drawn, ...], tuple[Scored, ...]]

Reading = Callable[[], Results]
"""Waits for what a step draws and scores; the device has all work for it."""


class Timing(Protocol):
    """When one step is computed."""

    def computed(self) -> None:
        """All work of the step has been given to the device."""

    def busy_ns(self) -> tuple[int, int]:
        """When the device began and ended, by the host's clock. Waits for that work."""


class HostTiming:
    """For work that is done when its call returns."""

    def __init__(self) -> None:
        self._begun_ns = self._ended_ns = time.monotonic_ns()

    def computed(self) -> None:
        self._ended_ns = time.monotonic_ns()

    def busy_ns(self) -> tuple[int, int]:
        return self._begun_ns, self._ended_ns


class StageModel(Protocol):
    """What computes a stage's steps: a `Decoder`, or one whose work was recorded."""

    arch: Architecture
    layout: StageLayout
    backend: Backend

    def forward(self, inputs: StepInputs, hidden_TD: torch.Tensor | None) -> torch.Tensor:
        """(T, D) hidden states after this stage's sublayers. hidden_TD: the stage before's, None on the first.
        Writes the rows' keys and values to the inputs' cache."""

    def read_out(self, inputs: StepInputs, hidden_TD: torch.Tensor) -> Reading:
        """Draw and score what the plan asks for; no row, no head. Last stage only."""


class Backend(Protocol):
    """A device in one precision. read_rows_at_once: rows of logits in memory at a time. more_rows, more_head_rows:
    for the self-test, ascending numbers of rows above 128 for which linear layers and the LM head may get other
    kernels."""

    device: torch.device
    precision: Precision
    read_rows_at_once: int
    more_rows: tuple[int, ...]
    more_head_rows: tuple[int, ...]

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """An embedding, a bias or a norm's weight, rounded as hidden states."""

    def linear(self, weight_NK: Matrix, bias_N: torch.Tensor | None, is_probe: bool = False) -> Linear:
        """Packs a weight, which can then be released. bias_N: as `stored`. is_probe: of the self-test."""

    def lm_head(self, weight_NK: Matrix) -> Linear:
        """The same for the LM head, by `Precision.head`."""

    def check(self, weights: ResidualWeights) -> None:
        """Raises ConfigError where this precision is too coarse for these weights."""

    def norm(self, weights: NormWeights) -> Operator:
        """The norm of hidden states or of a sublayer's results, in `Precision.compute`."""

    def attention(self, weights: AttentionWeights) -> Sublayer:
        """proj(attend(qkv(x))), with queries and keys rotated if the model asks."""

    def mlp(self, weights: MLPWeights) -> Sublayer:
        """contract(activation(expand(x))), or with a gate. KeyError for an unknown activation."""

    def fused(self, lines: Sequence[ResidualWeights]) -> Sublayer | None:
        """An optimisation: a whole block, with the bits of `decoder.Block`'s lines; None where there is none."""

    def head(self, norm: NormWeights, linear: Linear) -> Head:
        """linear(norm(x))."""

    def block_bytes(self, arch: Architecture, layout: StageLayout, block_size: int) -> int:
        """Bytes that one KV block takes on a rank."""

    def make_cache(
        self, arch: Architecture, layout: StageLayout, num_blocks: int, block_size: int, *, populate: bool = False
    ) -> KVCache:
        """populate: a thread begins to take its memory from the system."""

    def recorded(self, model: StageModel, cache: KVCache) -> StageModel:
        """The model with usual steps recorded, if it can. Writes to the cache, for seconds."""

    def read_logits(self, inputs: StepInputs, pieces_Rv: Iterator[torch.Tensor], vocabulary: Cut) -> Reading:
        """Draws from and scores logits in `read_rows`' order. The first tensor rank has results."""

    def timing(self) -> Timing:
        """A step's computation begins now."""

    def describe(self) -> str:
        """What it computes with. Where these words differ, so may bits."""
