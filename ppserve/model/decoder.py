"""One stage of a decoder: the whole model, or the same class with parts missing.

A layer is two residual lines: x + attention(norm(x)), then x + mlp(norm(x)). `Residual` computes such a line as it
is written here, with the norms and multipliers that a layer may have beside (`core/layers.py`). `model/layers.py`
says which tensors make a line. A backend computes norms, attentions and MLPs (`model/backend.py`), and may have
one call for several lines (`Backend.fused`).

Each tensor rank of a stage has some outputs of every matrix. All outputs are gathered before anything sums over
them. So every sum is made by one rank, in the same order as without tensor ranks.

T rows (tokens of all slices, packed), D width, R rows read out, v a rank's own vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from functools import cached_property
from typing import Generic

import torch

from ppserve.core.architecture import StageLayout
from ppserve.model.backend import (
    Backend,
    Linear,
    NormWeights,
    Operator,
    OwnLinear,
    Progress,
    Reading,
    ResidualWeights,
    Sublayer,
)
from ppserve.model.checkpoint import Checkpoint
from ppserve.model.inputs import Inputs
from ppserve.model.layers import Embedding, read_attention_line, read_mlp_line
from ppserve.model.weights import WeightReader


class Residual(Generic[Inputs]):
    """A residual line of a block: it adds what its attention or its MLP computes to the hidden states."""

    def __init__(self, backend: Backend[Inputs, OwnLinear], weights: ResidualWeights[OwnLinear]) -> None:
        backend.check(weights)
        self.norm = _norm(backend, weights.pre_norm)
        self.compute = weights.of.sublayer(backend)
        self.post_norm = _norm(backend, weights.post_norm)
        self._multiplier = weights.multiplier

    def __call__(self, x_TD: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        added_TD = self.post_norm(self.compute(self.norm(x_TD), inputs))
        if self._multiplier != 1:
            added_TD = added_TD * self._multiplier
        return (x_TD + added_TD).to(x_TD.dtype)


def _norm(backend: Backend[Inputs, OwnLinear], weights: NormWeights | None) -> Operator:
    """Return a norm. Without weights it leaves rows as they are, apart from their dtype, which is `compute`."""
    if weights is None:
        return lambda x_TD: x_TD.to(backend.precision.compute)
    return backend.norm(weights)


class Block(Generic[Inputs, OwnLinear]):
    """A layer: two residual lines, or the one of them that this stage has."""

    def __init__(self, read: WeightReader[Inputs, OwnLinear], layer: int) -> None:
        """layer: its number in the whole model."""
        self.attention: Residual[Inputs] | None = None
        self.mlp: Residual[Inputs] | None = None
        self.lines: list[ResidualWeights[OwnLinear]] = []
        """The weights of each of its residual lines."""
        if layer in read.layout.attentions:
            self.lines.append(of := read_attention_line(read, layer))
            self.attention = Residual(read.backend, of)
        if layer in read.layout.mlps:
            self.lines.append(of := read_mlp_line(read, layer))
            self.mlp = Residual(read.backend, of)

    def __call__(self, x_TD: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        if self.attention is not None:
            x_TD = self.attention(x_TD, inputs)
        if self.mlp is not None:
            x_TD = self.mlp(x_TD, inputs)
        return x_TD


class LMHead:
    """The final norm and the logits of the ids that this tensor rank has, padding ids not included."""

    def __init__(self, read: WeightReader[Inputs, OwnLinear]) -> None:
        norm = read.norm("ln_f", read.arch.final_norm)
        assert norm is not None, "every model has a final norm"
        linear = read.lm_head(read.layout.cut(read.arch.vocab_size).own)
        self.linear: Linear = linear
        self.logits = read.backend.head(norm, linear)


class Decoder(Generic[Inputs, OwnLinear]):
    """A `StageModel`: `layout`'s layers, the first stage's embeddings, the last one's head."""

    def __init__(self, read: WeightReader[Inputs, OwnLinear]) -> None:
        self.arch = read.arch
        self.layout = read.layout
        self.backend = read.backend
        # The LM head comes first: on GPUs, the largest matrix is in memory twice while it is packed.
        self.head = LMHead(read) if self.layout.is_last else None
        self._embed = Embedding(read) if self.layout.is_first else None
        self.blocks = [Block(read, layer) for layer in self.layout.layers]
        self.calls: Sequence[Sublayer[Inputs]] = self._calls()
        self.linears = read.linears
        """The blocks' linear layers, by name."""
        self.num_params, self.weight_bytes = read.num_params, read.weight_bytes

    def _calls(self) -> Sequence[Sublayer[Inputs]]:
        """Return the calls that compute the blocks: one for all residual lines, or one for those of each block, if
        the backend has it; else the blocks themselves. The bits are the same."""
        whole = self.backend.fused(self._lines)
        if whole is not None:
            return [whole]
        return [self.backend.fused(block.lines) or block for block in self.blocks]

    @property
    def _lines(self) -> list[ResidualWeights[OwnLinear]]:
        return [line for block in self.blocks for line in block.lines]

    @cached_property
    def sublayers(self) -> list[Sublayer[Inputs]]:
        """The stage's residual lines one by one, in the order in which they are computed."""
        return [self.backend.fused([line]) or Residual(self.backend, line) for line in self._lines]

    def computing(self, *sublayers: Sublayer[Inputs]) -> Decoder[Inputs, OwnLinear]:
        """Return a stage with the same weights, which computes these sublayers in place of its blocks."""
        other = copy(self)
        other.calls = sublayers
        return other

    @torch.inference_mode()
    def forward(self, inputs: Inputs, hidden_TD: torch.Tensor | None) -> torch.Tensor:
        x_TD = hidden_TD if self._embed is None else self._embed(inputs)
        assert x_TD is not None, "only the first stage has no stage before it"
        assert x_TD.shape == (inputs.num_rows, self.arch.width)
        for compute in self.calls:
            x_TD = compute(x_TD, inputs)
        return x_TD

    @torch.inference_mode()
    def read_out(self, inputs: Inputs, hidden_TD: torch.Tensor) -> Reading:
        vocabulary = self.layout.cut(self.arch.vocab_size)
        return self.backend.read_logits(inputs, self._read_logits(inputs, hidden_TD), vocabulary)

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        assert self.head is not None, "only the last stage reads out"
        return self.head.logits(hidden_RD)

    def _read_logits(self, inputs: Inputs, hidden_TD: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the logits of the rows that are read out, some rows at a time."""
        for rows_R in torch.split(inputs.read_rows_R, self.backend.read_rows_at_once):
            if len(rows_R):
                yield self.logits(hidden_TD.index_select(0, rows_R))


def load_stage(
    checkpoint: Checkpoint,
    layout: StageLayout,
    backend: Backend[Inputs, OwnLinear],
    progress: Progress = lambda done, total: None,
) -> Decoder[Inputs, OwnLinear]:
    """Read a stage's tensors, one at a time, and pack them. Raises CheckpointError."""
    with torch.inference_mode():
        return Decoder(WeightReader(checkpoint, layout, backend, progress))
