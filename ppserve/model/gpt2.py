"""One stage of a GPT-2: the whole model, or the same class with parts missing.

A layer is two residual lines, `Block.__call__`: x + attention(norm(x)), then x + mlp(norm(x)). This file says
which tensors make a sublayer; a backend computes it, with its norm and its residual (`model/backend.py`).

Where several tensor ranks compute a stage together, each has some outputs of every matrix, and what it computed is
gathered before anything sums over it. So every sum is that of one rank, in the same order.

T rows (tokens of all slices, packed), D width, d a rank's own of it, V vocabulary, v a rank's own of it, R rows
read out.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ppserve.core.architecture import StageLayout
from ppserve.model.backend import AttentionWeights, Backend, MLPWeights, Reading, Sublayer
from ppserve.model.checkpoint import Checkpoint
from ppserve.model.inputs import StepInputs
from ppserve.model.weights import Progress, WeightReader


class Embedding:
    """Token plus position. A tensor rank has some of the columns."""

    def __init__(self, read: WeightReader) -> None:
        self._columns = read.layout.cut(read.arch.width)
        self._tokens_Vd, self._positions_Pd = (
            read.embedding(name, self._columns.own) for name in ("wte.weight", "wpe.weight")
        )

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        own_Td = self._tokens_Vd[inputs.token_ids_T].add_(self._positions_Pd[inputs.positions_T])
        return inputs.gather.all(own_Td, self._columns)


class Block:
    """A layer, or the half of it that is on this stage."""

    def __init__(self, read: WeightReader, layer: int) -> None:
        layout = read.layout
        self.attention = _attention(read, layer) if layer in layout.attentions else None
        self.mlp = _mlp(read, layer) if layer in layout.mlps else None

    def __call__(self, x_TD: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        if self.attention is not None:
            x_TD = self.attention(x_TD, inputs)  # x + attention(norm(x))
        if self.mlp is not None:
            x_TD = self.mlp(x_TD, inputs)  # x + mlp(norm(x))
        return x_TD


def _attention(read: WeightReader, layer: int) -> Sublayer:
    """A tensor rank has some of the heads, and some outputs of the projection behind them."""
    arch, layout = read.arch, read.layout
    norm = read.norm(f"h.{layer}.ln_1")
    heads, columns = layout.cut(arch.num_heads).times(arch.head_size), layout.cut(arch.width)
    own = (slice(heads.own.start + i * arch.width, heads.own.stop + i * arch.width) for i in range(3))
    qkv = read.linear(f"h.{layer}.attn.c_attn", *own)
    proj = read.linear(f"h.{layer}.attn.c_proj", columns.own)
    number, scale = layer - layout.attentions.start, arch.attention_scale(layer)
    return read.backend.attention(AttentionWeights(number, scale, norm, qkv, proj, heads, columns))


def _mlp(read: WeightReader, layer: int) -> Sublayer:
    """A tensor rank has some outputs of both matrices."""
    arch, layout = read.arch, read.layout
    norm = read.norm(f"h.{layer}.ln_2")
    inner, columns = layout.cut(arch.inner_width), layout.cut(arch.width)
    expand = read.linear(f"h.{layer}.mlp.c_fc", inner.own)
    contract = read.linear(f"h.{layer}.mlp.c_proj", columns.own)
    return read.backend.mlp(MLPWeights(norm, expand, arch.activation, contract, inner, columns))


class LMHead:
    """Final norm and logits, of a tensor rank's part of the vocabulary. Ids that only pad it have none: they can
    never be drawn."""

    def __init__(self, read: WeightReader) -> None:
        norm = read.norm("ln_f")
        self.linear = read.lm_head(read.layout.cut(read.arch.vocab_size).own)
        self.logits = read.backend.head(norm, self.linear)


class GPT2Stage:
    """A `StageModel`: the layers of `layout`, the embeddings on the first stage, the head on the last."""

    def __init__(self, read: WeightReader) -> None:
        self.arch, self.layout, self.backend = read.arch, read.layout, read.backend
        # The LM head before all else: on GPUs the largest matrix is twice in memory while it is being packed.
        self.head = LMHead(read) if self.layout.is_last else None
        self._embed = Embedding(read) if self.layout.is_first else None
        self.blocks = [Block(read, layer) for layer in self.layout.layers]
        self.linears = read.linears
        """Those of the blocks, by name."""
        self.num_params, self.weight_bytes = read.num_params, read.weight_bytes

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        layout: StageLayout,
        backend: Backend,
        progress: Progress = lambda done, total: None,
    ) -> GPT2Stage:
        """Read this stage's tensors, one at a time, and pack them. Raises CheckpointError."""
        with torch.inference_mode():
            return cls(WeightReader(checkpoint, layout, backend, progress))

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, hidden_TD: torch.Tensor | None) -> torch.Tensor:
        x_TD = hidden_TD if self._embed is None else self._embed(inputs)
        assert x_TD is not None, "only the first stage has no stage before it"
        assert x_TD.shape == (inputs.num_rows, self.arch.width)
        for block in self.blocks:
            x_TD = block(x_TD, inputs)
        return x_TD

    @torch.inference_mode()
    def read_out(self, inputs: StepInputs, hidden_TD: torch.Tensor) -> Reading:
        assert self.head is not None, "only the last stage reads out"
        vocabulary = self.layout.cut(self.arch.vocab_size)
        return self.backend.read_logits(inputs, self._logits(self.head, inputs, hidden_TD), vocabulary)

    def _logits(self, head: LMHead, inputs: StepInputs, hidden_TD: torch.Tensor) -> Iterator[torch.Tensor]:
        """Logits of the rows to read out, a few at a time."""
        for rows_R in torch.split(inputs.read_rows_R, self.backend.read_rows_at_once):
            if len(rows_R):
                yield head.logits(hidden_TD.index_select(0, rows_R))
