"""The layers of a GPT-2: which tensors make its embedding, attention and MLP.

T rows (tokens of all slices, packed), D width, d a rank's own of it, V vocabulary, P positions.
"""

from __future__ import annotations

import torch

from ppserve.model.backend import AttentionWeights, MLPWeights, Sublayer
from ppserve.model.decoder import ModelParts
from ppserve.model.inputs import StepInputs
from ppserve.model.weights import WeightReader


class Embedding:
    """Token plus position. A tensor rank has some columns."""

    def __init__(self, read: WeightReader) -> None:
        self._columns = read.layout.cut(read.arch.width)
        self._tokens_Vd, self._positions_Pd = (
            read.embedding(name, self._columns.own) for name in ("wte.weight", "wpe.weight")
        )

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        own_Td = self._tokens_Vd[inputs.token_ids_T].add_(self._positions_Pd[inputs.positions_T])
        return inputs.gather.all(own_Td, self._columns)


def _attention(read: WeightReader, layer: int) -> Sublayer:
    """A tensor rank has some heads, and some outputs of the projection behind them."""
    arch, layout = read.arch, read.layout
    norm = read.norm(f"h.{layer}.ln_1")
    heads = layout.heads(arch).times(arch.head_size)
    columns = layout.cut(arch.width)
    own = (slice(heads.own.start + i * arch.width, heads.own.stop + i * arch.width) for i in range(3))
    qkv = read.linear(*((f"h.{layer}.attn.c_attn", outputs) for outputs in own))
    proj = read.linear((f"h.{layer}.attn.c_proj", columns.own))
    number = layer - layout.attentions.start
    scale = arch.attention_scale(layer)
    return read.backend.attention(AttentionWeights(number, scale, norm, qkv, proj, heads, columns, arch.head_size))


def _mlp(read: WeightReader, layer: int) -> Sublayer:
    """A tensor rank has some outputs of both matrices."""
    arch, layout = read.arch, read.layout
    norm = read.norm(f"h.{layer}.ln_2")
    inner = layout.cut(arch.inner_width)
    columns = layout.cut(arch.width)
    expand = read.linear((f"h.{layer}.mlp.c_fc", inner.own))
    contract = read.linear((f"h.{layer}.mlp.c_proj", columns.own))
    return read.backend.mlp(MLPWeights(norm, expand, arch.activation, contract, inner, columns))


PARTS = ModelParts(Embedding, _attention, _mlp)
