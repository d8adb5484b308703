"""The layers of a Llama and its kin (Mistral, Qwen 2 and 3): which tensors make what.

Beside a GPT-2: norms leave the mean where it is, positions turn queries and keys, several heads of queries read
the keys and values of one head, and the MLP has a gate.

T rows (tokens of all slices, packed), D width, d a rank's own of it, V vocabulary.
"""

from __future__ import annotations

import torch

from ppserve.model.backend import AttentionWeights, MLPWeights, Sublayer
from ppserve.model.decoder import ModelParts
from ppserve.model.inputs import StepInputs
from ppserve.model.weights import WeightReader


class TokenEmbedding:
    """The token alone. A tensor rank has some columns."""

    def __init__(self, read: WeightReader) -> None:
        self._columns = read.layout.cut(read.arch.width)
        self._tokens_Vd = read.embedding("wte.weight", self._columns.own)

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        return inputs.gather.all(self._tokens_Vd[inputs.token_ids_T], self._columns)


def _attention(read: WeightReader, layer: int) -> Sublayer:
    """A tensor rank has some heads of keys and values, and the queries that read them."""
    arch, layout, name = read.arch, read.layout, f"h.{layer}.attn"
    norm = read.norm(f"h.{layer}.ln_1")
    heads, kv_heads = (cut.times(arch.head_size) for cut in (layout.heads(arch), layout.kv_heads(arch)))
    columns = layout.cut(arch.width)
    qkv = read.linear((f"{name}.q", heads.own), (f"{name}.k", kv_heads.own), (f"{name}.v", kv_heads.own))
    head_norms = (read.norm(f"{name}.q_norm"), read.norm(f"{name}.k_norm")) if arch.qk_norms else None
    proj = read.linear((f"{name}.o", columns.own))
    number = layer - layout.attentions.start
    scale = arch.attention_scale(layer)
    return read.backend.attention(
        AttentionWeights(number, scale, norm, qkv, proj, heads, columns, arch.head_size, head_norms)
    )


def _mlp(read: WeightReader, layer: int) -> Sublayer:
    """contract(activation(gate(x)) * up(x)), with a tensor rank's outputs."""
    arch, layout, name = read.arch, read.layout, f"h.{layer}.mlp"
    norm = read.norm(f"h.{layer}.ln_2")
    inner = layout.cut(arch.inner_width)
    columns = layout.cut(arch.width)
    expand = read.linear((f"{name}.gate", inner.own), (f"{name}.up", inner.own))
    contract = read.linear((f"{name}.down", columns.own))
    weights = MLPWeights(norm, expand, arch.activation, contract, inner, columns, is_gated=True)
    return read.backend.mlp(weights)


PARTS = ModelParts(TokenEmbedding, _attention, _mlp)
