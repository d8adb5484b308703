"""One stage of a GPT-2: the whole model, or the same class with parts missing.

Where several tensor ranks compute a stage together, each has some outputs of every matrix, and what it computed is
gathered before anything sums over it. So every sum is that of one rank, in the same order.

A layer is two residual lines: `SelfAttention.__call__` and `MLP.__call__`. How the operators compute is the
backend's (`model/backend.py`).

T rows (tokens of all slices, packed), D width, d a rank's own of it, V vocabulary, v a rank's own of it, R rows
read out.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ppserve.core.architecture import StageLayout
from ppserve.model.backend import Backend, KVCache, Reading, StepInputs
from ppserve.model.checkpoint import Checkpoint
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


class SelfAttention:
    """The first sublayer of layer `layer`; `own` is its number among the stage's attentions.

    A tensor rank has some of the heads, and some outputs of the projection behind them.
    """

    def __init__(self, read: WeightReader, layer: int, own: int) -> None:
        arch, layout = read.arch, read.layout
        self.own, self.scale = own, arch.attention_scale(layer)
        self.norm = read.norm(f"h.{layer}.ln_1")
        self.context, self.columns = layout.cut(arch.num_heads).times(arch.head_size), layout.cut(arch.width)
        heads = self.context.own
        qkv = (slice(heads.start + i * arch.width, heads.stop + i * arch.width) for i in range(3))
        self.qkv = read.linear(f"h.{layer}.attn.c_attn", *qkv)
        self.proj = read.linear(f"h.{layer}.attn.c_proj", self.columns.own)
        self._precision = read.backend.precision
        self.fused = read.backend.fused_attention(self)

    def __call__(self, hidden_TD: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        if self.fused is not None:
            return self.fused(hidden_TD, inputs)
        gather, precision = inputs.gather, self._precision
        x_TD = hidden_TD.to(precision.compute)
        own_heads = inputs.attend(self.own, self.qkv(self.norm(x_TD)), self.scale)
        own_Td = x_TD[:, self.columns.own] + self.proj(gather.all(own_heads, self.context))
        return gather.all(own_Td.to(precision.hidden), self.columns)


class MLP:
    """The second sublayer of layer `layer`. A tensor rank has some outputs of both matrices."""

    def __init__(self, read: WeightReader, layer: int) -> None:
        arch, layout = read.arch, read.layout
        self.norm = read.norm(f"h.{layer}.ln_2")
        self.inner, self.columns = layout.cut(arch.inner_width), layout.cut(arch.width)
        self.expand = read.linear(f"h.{layer}.mlp.c_fc", self.inner.own)
        self.contract = read.linear(f"h.{layer}.mlp.c_proj", self.columns.own)
        self.activate = read.backend.activation(arch.activation)
        self._precision = read.backend.precision
        self.fused = read.backend.fused_mlp(self)

    def __call__(self, hidden_TD: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        if self.fused is not None:
            return self.fused(hidden_TD, inputs)
        gather, precision = inputs.gather, self._precision
        x_TD = hidden_TD.to(precision.compute)
        own_inner = self.activate(self.expand(self.norm(x_TD)))
        own_Td = x_TD[:, self.columns.own] + self.contract(gather.all(own_inner, self.inner))
        return gather.all(own_Td.to(precision.hidden), self.columns)


class LMHead:
    """Final norm and logits, of a tensor rank's part of the vocabulary. Ids that only pad it have none: they can
    never be drawn."""

    def __init__(self, read: WeightReader) -> None:
        self._ln_f = read.norm("ln_f")
        self.linear = read.lm_head(read.layout.cut(read.arch.vocab_size).own)
        self._compute = read.backend.precision.compute
        self._fused = read.backend.fused_head(self._ln_f, self.linear)

    def __call__(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """(R, D) → float32 logits (R, v) of the rank's own ids."""
        return self.linear(self._ln_f(hidden_RD)).float()

    def read(self, hidden_TD: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """Those of some rows of hidden states."""
        fused = self._fused
        return fused(hidden_TD, rows_R) if fused else self(hidden_TD.index_select(0, rows_R).to(self._compute))


class GPT2Stage:
    """A `StageModel`: the sublayers of `layout`, the embeddings on the first stage, the head on the last.

    num_params, weight_bytes: what it holds.
    """

    def __init__(self, read: WeightReader, layout: StageLayout) -> None:
        self.arch, self.layout, self.backend = read.arch, layout, read.backend
        # The LM head before all else: on GPUs the largest matrix is twice in memory while it is being packed.
        self.head = LMHead(read) if layout.is_last else None
        self._embed = Embedding(read) if layout.is_first else None
        self.sublayers = [_sublayer(read, layout, number) for number in layout.sublayers]
        self.joined = read.backend.joined([sublayer.fused for sublayer in self.sublayers])
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
            return cls(WeightReader(checkpoint, layout, backend, progress), layout)

    @property
    def attentions(self) -> list[SelfAttention]:
        return [sublayer for sublayer in self.sublayers if isinstance(sublayer, SelfAttention)]

    @property
    def mlps(self) -> list[MLP]:
        return [sublayer for sublayer in self.sublayers if isinstance(sublayer, MLP)]

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, hidden_TD: torch.Tensor | None, cache: KVCache) -> torch.Tensor:
        cache.begin(inputs.rows)
        x_TD = hidden_TD if self._embed is None else self._embed(inputs)
        assert x_TD is not None, "only the first stage has no stage before it"
        assert x_TD.shape == (inputs.num_rows, self.arch.width)
        if self.joined is not None:
            return self.joined(x_TD, inputs)
        for sublayer in self.sublayers:
            x_TD = sublayer(x_TD, inputs)
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
                yield head.read(hidden_TD, rows_R)


def _sublayer(read: WeightReader, layout: StageLayout, number: int) -> SelfAttention | MLP:
    layer, is_mlp = divmod(number, 2)
    return MLP(read, layer) if is_mlp else SelfAttention(read, layer, layer - layout.attentions.start)
