"""One stage of a GPT-2: the whole model, or the same class with parts missing.

A layer is two residual lines: `SelfAttention.__call__` and `MLP.__call__`. How the operators compute is the
backend's (`model/backend.py`).

T rows (tokens of all slices, packed), D width, V vocabulary, R rows read out.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ppserve.core.architecture import StageLayout
from ppserve.model.backend import Attend, Backend, KVCache, Reading, StepInputs
from ppserve.model.checkpoint import Checkpoint
from ppserve.model.weights import Progress, WeightReader


class Embedding:
    """Token plus position."""

    def __init__(self, read: WeightReader) -> None:
        self._tokens_VD = read.stored("wte.weight")
        self._positions_PD = read.stored("wpe.weight")

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        return self._tokens_VD[inputs.token_ids_T].add_(self._positions_PD[inputs.positions_T])


class SelfAttention:
    """The first sublayer of layer `layer`; `own` is its number among the stage's attentions."""

    def __init__(self, read: WeightReader, layer: int, own: int) -> None:
        self.own, self.scale = own, read.arch.attention_scale(layer)
        self.norm = read.norm(f"h.{layer}.ln_1")
        self.qkv, self.proj = read.linear(f"h.{layer}.attn.c_attn"), read.linear(f"h.{layer}.attn.c_proj")
        self._precision = read.backend.precision
        self._fused = read.backend.fused_attention(self)

    def __call__(self, hidden_TD: torch.Tensor, attend: Attend) -> torch.Tensor:
        if self._fused is not None:
            return self._fused(hidden_TD, attend)
        x_TD = hidden_TD.to(self._precision.compute)
        x_TD = x_TD + self.proj(attend(self.own, self.qkv(self.norm(x_TD)), self.scale))
        return x_TD.to(self._precision.hidden)


class MLP:
    """The second sublayer of layer `layer`."""

    def __init__(self, read: WeightReader, layer: int) -> None:
        self.norm = read.norm(f"h.{layer}.ln_2")
        self.expand, self.contract = read.linear(f"h.{layer}.mlp.c_fc"), read.linear(f"h.{layer}.mlp.c_proj")
        self.activate = read.backend.activation(read.arch.activation)
        self._precision = read.backend.precision
        self._fused = read.backend.fused_mlp(self)

    def __call__(self, hidden_TD: torch.Tensor, attend: Attend) -> torch.Tensor:
        if self._fused is not None:
            return self._fused(hidden_TD, attend)
        x_TD = hidden_TD.to(self._precision.compute)
        x_TD = x_TD + self.contract(self.activate(self.expand(self.norm(x_TD))))
        return x_TD.to(self._precision.hidden)


class Head:
    """Final norm and logits."""

    def __init__(self, read: WeightReader) -> None:
        self._ln_f = read.norm("ln_f")
        self.linear = read.lm_head()

    def __call__(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """(R, D) → float32 logits (R, V)."""
        return self.linear(self._ln_f(hidden_RD)).float()


class GPT2Stage:
    """The sublayers of `layout`, the embeddings on the first stage, the head on the last.

    num_params, weight_bytes: what it holds.
    """

    def __init__(self, read: WeightReader, layout: StageLayout) -> None:
        self.arch, self.layout, self.backend = read.arch, layout, read.backend
        # The head before all else: the largest matrix is twice in memory while it is being packed.
        self.head = Head(read) if layout.is_last else None
        self._embed = Embedding(read) if layout.is_first else None
        self.sublayers = [_sublayer(read, layout, number) for number in layout.sublayers]
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
        """(T, D) hidden states after this stage's sublayers. hidden_TD: those of the stage before, None on the
        first. Writes the rows' keys and values to `cache`, for which the inputs were built."""
        cache.begin(inputs.rows)
        x_TD = hidden_TD if self._embed is None else self._embed(inputs)
        assert x_TD is not None, "only the first stage has no stage before it"
        assert x_TD.shape == (inputs.num_rows, self.arch.width)
        for sublayer in self.sublayers:
            x_TD = sublayer(x_TD, inputs.attend)
        return x_TD

    @torch.inference_mode()
    def read_out(self, inputs: StepInputs, hidden_TD: torch.Tensor) -> Reading:
        """Draw and score what the plan asks for; no row, no head. Last stage only."""
        return self.backend.read_logits(inputs, self._logits(inputs, hidden_TD))

    def _logits(self, inputs: StepInputs, hidden_TD: torch.Tensor) -> Iterator[torch.Tensor]:
        """Logits of the rows to read out, a few at a time."""
        assert self.head is not None, "only the last stage reads out"
        for rows_R in torch.split(inputs.read_rows_R, self.backend.read_rows_at_once):
            if len(rows_R):
                yield self.head(hidden_TD.index_select(0, rows_R).to(self.backend.precision.compute))


def _sublayer(read: WeightReader, layout: StageLayout, number: int) -> SelfAttention | MLP:
    layer, is_mlp = divmod(number, 2)
    return MLP(read, layer) if is_mlp else SelfAttention(read, layer, layer - layout.attentions.start)
