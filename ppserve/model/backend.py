"""What the model asks of a kind of device.

The model knows which tensors go through which operator in which order; a backend knows how they are computed. It
owns the layout of weights, keys and values in memory, and the arithmetic. There are two, `cpu` and `cuda`, which
have kernels of their own. `stock` has what a backend may take from torch: norms, activations, plain linear layers.

A row is *read out* if the last stage computes its logits, to draw the next token from them or to score it.

T rows, D width, K inputs, N outputs, R rows read out, v a rank's own vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from ppserve.core.architecture import Architecture, Cut, StageLayout
from ppserve.core.layers import AttentionSpec, MLPSpec
from ppserve.core.plan import Drawn, Scored, StepPlan
from ppserve.model.checkpoint import Checkpoint, Matrix
from ppserve.model.inputs import Gather, Inputs, KVCache, StepInputs

INT4: torch.dtype = getattr(torch, "int4")  # noqa: B009 (torch has it, its stubs do not)


@dataclass(frozen=True, slots=True)
class Precision:
    """The types in which numbers are kept and computed.

    weights: the type of linear layers' weights; embeddings, biases and norms are kept as `hidden` or wider. kv:
    the type of keys and values. compute: the type that operators take and return. hidden: the type to which hidden
    states are rounded after every attention and every MLP, so that it does not matter where stages are cut.
    """

    weights: torch.dtype
    kv: torch.dtype
    compute: torch.dtype
    hidden: torch.dtype

    @property
    def head(self) -> torch.dtype:
        """The type of the LM head's weights: the most sensitive layer has at least 8 bits."""
        return torch.int8 if self.weights == INT4 else self.weights


class Linear(Protocol):
    """A linear layer, y = x Wᵀ + b. num_bytes: the size of its weights as they are kept."""

    num_inputs: int
    num_outputs: int
    num_bytes: int

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """Multiply rows (T, K), contiguous. Return (T, N), a new tensor. Both are in `Precision.compute`."""


OwnLinear = TypeVar("OwnLinear", bound=Linear)
"""A backend's own linear layers."""


@dataclass(frozen=True, slots=True)
class NormWeights:
    """The weights of a norm over D numbers, as `Backend.stored` keeps them."""

    weight_D: torch.Tensor
    bias_D: torch.Tensor | None
    epsilon: float
    is_rms: bool = False  # leaves the mean where it is


class SublayerWeights(Generic[OwnLinear]):
    """What the sublayer of a residual line is made of, whichever kind it is."""

    __slots__ = ()

    def sublayer(self, backend: Backend[Inputs, OwnLinear]) -> Sublayer[Inputs]:
        """Return what computes it from normed rows."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class AttentionWeights(SublayerWeights[OwnLinear]):
    """What an attention is made of."""

    number: int  # its place among the attentions of the stage, from 0
    spec: AttentionSpec
    rotary: int | None  # the number of its rotary positions in `Architecture.rotaries`
    qkv: OwnLinear  # queries, then keys, then values of the rank's heads
    proj: OwnLinear
    heads: Cut  # the outputs of all heads, as tensor ranks share them
    columns: Cut  # the hidden states, as tensor ranks share them
    head_norms: tuple[NormWeights, NormWeights] | None = None
    """The norms of each head's queries and keys, before these are rotated by their positions."""

    def sublayer(self, backend: Backend[Inputs, OwnLinear]) -> Sublayer[Inputs]:
        return backend.attention(self)


@dataclass(frozen=True, slots=True)
class MLPWeights(SublayerWeights[OwnLinear]):
    """What an MLP is made of."""

    spec: MLPSpec
    expand: OwnLinear  # where the MLP is gated: the gate, which is activated, then what it is multiplied with
    contract: OwnLinear
    inner: Cut  # the inputs of `contract`, as tensor ranks share them
    columns: Cut  # the hidden states, as tensor ranks share them

    def sublayer(self, backend: Backend[Inputs, OwnLinear]) -> Sublayer[Inputs]:
        return backend.mlp(self)


@dataclass(frozen=True, slots=True)
class ResidualWeights(Generic[OwnLinear]):
    """What a residual line is made of: x + multiplier * post_norm(of(pre_norm(x)))."""

    pre_norm: NormWeights | None
    of: SublayerWeights[OwnLinear]
    post_norm: NormWeights | None
    multiplier: float


Sublayer = Callable[[torch.Tensor, Inputs], torch.Tensor]
"""It takes rows (T, D), contiguous, and returns (T, D). An attention or an MLP takes normed rows and returns what
is added to the hidden states, both in `Precision.compute`. A block takes and returns hidden states, in
`Precision.hidden`."""

Progress = Callable[[int, int], None]
"""It is called with the number of bytes read so far, and that of all bytes to be read."""

Operator = Callable[[torch.Tensor], torch.Tensor]
"""A norm or an activation of rows."""

Head = Callable[[torch.Tensor], torch.Tensor]
"""It takes hidden states (R, D) and returns float32 logits (R, v) of the ids that this tensor rank has. They are
valid until the next call."""

Results = tuple[tuple[Drawn, ...], tuple[Scored, ...]]
"""What a step has drawn and scored."""

Reading = Callable[[], Results]
"""It waits for what a step draws and scores, and returns it. The device has been given all work for it before."""


class Timing(Protocol):
    """The time in which one step is computed."""

    def computed(self) -> None:
        """Note that all work of the step has been given to the device."""

    def busy_ns(self) -> tuple[int, int]:
        """Wait for the work, and return when the device began and ended it, by the host's clock."""


class HostTiming:
    """The timing of work that is done when its call returns."""

    def __init__(self) -> None:
        self._begun_ns = self._ended_ns = time.monotonic_ns()

    def computed(self) -> None:
        self._ended_ns = time.monotonic_ns()

    def busy_ns(self) -> tuple[int, int]:
        return self._begun_ns, self._ended_ns


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step of a stage, whose inputs are on the device."""

    forward: Callable[[torch.Tensor | None], torch.Tensor]
    """Takes the hidden states (T, D) of the stage before; None on the first stage. Returns those after this
    stage's sublayers. It writes the rows' keys and values to the cache."""
    read_out: Callable[[torch.Tensor, StepPlan], Reading]
    """Takes what `forward` returned and the plan, which has all its masks now. Draws and scores what the plan asks
    for. Only the last stage may call it."""


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A stage's model with its KV cache: it computes plans."""

    layout: StageLayout
    backend: AnyBackend
    prepare: Callable[[StepPlan, Gather], PreparedStep]
    """Prepares a step. It needs the plan alone, so it can be called before the hidden states are there."""


class LoadedModel(Protocol):
    """A stage's model as the stage sees it, whichever backend has its weights."""

    arch: Architecture
    layout: StageLayout
    num_params: int
    weight_bytes: int

    @property
    def backend(self) -> AnyBackend: ...

    def check_determinism(self, block_size: int) -> str | None:
        """See `selftest.check_determinism`."""

    def with_cache(self, num_blocks: int, block_size: int, *, populate: bool = False) -> CachedModel:
        """Return the model with a KV cache. A backend that can record steps records the usual ones now, which
        takes seconds. populate: let a thread begin to take the cache's memory from the system."""

    def parts(self, num_blocks: int, block_size: int) -> list[CachedModel]:
        """Return the model without its sublayers, with the first one, with the first two, and so on. `stage.probe`
        measures by them what each sublayer costs. All share their weights and one cache, which is filled with
        numbers."""


class AnyBackend(Protocol):
    """A device in one precision, as far as a stage sees it."""

    @property
    def device(self) -> torch.device: ...

    @property
    def precision(self) -> Precision: ...

    @property
    def reads_masks_last(self) -> bool:
        """Whether a plan's masks are needed only for its draws, so that they may come while the rest is
        computed."""

    def compile(self, report: Callable[[int, int], object], num_tensor: int = 1) -> None:
        """Compile the kernels that steps of a stage of so many tensor ranks need, unless they are kept from an
        earlier start, together with other processes that do the same. report: called before each one with its
        number, from 1, and their count."""

    def load(
        self, checkpoint: Checkpoint, layout: StageLayout, progress: Progress = lambda done, total: None
    ) -> LoadedModel:
        """Read a stage's tensors, one at a time, and pack them. Raises CheckpointError."""

    def block_bytes(self, arch: Architecture, layout: StageLayout, block_size: int) -> int:
        """Return the bytes that one KV block takes on a rank."""

    def timing(self) -> Timing:
        """Begin to time a step, whose computation begins now."""

    def describe(self) -> str:
        """Return, in words, what this backend computes with. Backends with different words may give different
        bits."""


ReadInputs = TypeVar("ReadInputs", bound=StepInputs, contravariant=True)
"""A backend's own inputs of a step, where they are only read."""


class Computing(Protocol[ReadInputs]):
    """What computes a stage's steps: a `Decoder`, or one whose steps were recorded."""

    def forward(self, inputs: ReadInputs, hidden_TD: torch.Tensor | None) -> torch.Tensor:
        """See `PreparedStep.forward`."""

    def read_out(self, inputs: ReadInputs, hidden_TD: torch.Tensor) -> Reading:
        """See `PreparedStep.read_out`. Where no row is read out, the LM head is not computed."""


class StageModel(Computing[ReadInputs], Protocol[ReadInputs]):
    """A stage's model as its backend sees it: a `Decoder`."""

    arch: Architecture
    layout: StageLayout

    @property
    def backend(self) -> AnyBackend: ...

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """See `Head`. Last stage only."""


class Backend(AnyBackend, Protocol[Inputs, OwnLinear]):
    """A device in one precision, with its own inputs of a step and its own linear layers.

    read_rows_at_once: how many rows of logits are in memory at a time. more_rows, more_head_rows: ascending
    numbers of rows above 128 for which linear layers, and the LM head, may use other kernels. The self-test tries
    them.
    """

    read_rows_at_once: int
    more_rows: tuple[int, ...]
    more_head_rows: tuple[int, ...]

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """Round an embedding, a bias or a norm's weight as hidden states are, and put it on the device."""

    def linear(self, weight_NK: Matrix, bias_N: torch.Tensor | None, for_selftest: bool = False) -> OwnLinear:
        """Pack a weight; afterwards it is no longer needed. bias_N: as `stored` returns it. for_selftest: whether
        the layer is made for the self-test, which drops it soon."""

    def lm_head(self, weight_NK: Matrix) -> OwnLinear:
        """Pack the LM head's weight, in the type `Precision.head`."""

    def check(self, weights: ResidualWeights[OwnLinear]) -> None:
        """Raise ConfigError if this precision is too coarse for these weights."""

    def norm(self, weights: NormWeights) -> Operator:
        """Return the norm of hidden states or of a sublayer's results. Its results are in `Precision.compute`."""

    def attention(self, weights: AttentionWeights[OwnLinear]) -> Sublayer[Inputs]:
        """Return proj(attend(qkv(x))), with queries and keys rotated if the model asks for it."""

    def mlp(self, weights: MLPWeights[OwnLinear]) -> Sublayer[Inputs]:
        """Return contract(activation(expand(x))), or this with a gate. It also takes some of the rows. Raises
        KeyError for an unknown activation."""

    def fused(self, lines: Sequence[ResidualWeights[OwnLinear]]) -> Sublayer[Inputs] | None:
        """Return one call for several residual lines, or None if this backend has none for such lines. It is an
        optimisation: it gives the same bits as the lines' `decoder.Residual`s called in turn. lines: at
        least one; they follow each other."""

    def head(self, norm: NormWeights, linear: OwnLinear) -> Head:
        """Return linear(norm(x))."""

    def make_cache(
        self, arch: Architecture, layout: StageLayout, num_blocks: int, block_size: int, *, populate: bool = False
    ) -> KVCache[Inputs]:
        """Make the cache of one rank. populate: let a thread begin to take its memory from the system."""

    def with_cache(
        self, model: StageModel[Inputs], num_blocks: int, block_size: int, *, populate: bool = False
    ) -> CachedModel:
        """See `LoadedModel.with_cache`."""

    def read_logits(self, inputs: Inputs, parts_Rv: Iterator[torch.Tensor], vocabulary: Cut) -> Reading:
        """Draw from logits and score them. Only the first tensor rank has results. parts_Rv: some rows at a time,
        in the order of `StepRows.read_rows`. vocabulary: which ids' logits each tensor rank has."""
