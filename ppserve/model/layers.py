"""The parts of a model as a stage reads them: which tensors make its embedding, and an attention and an MLP.

The names are canonical (`model.checkpoint.families.tensor_shapes`); what a layer has, its specification says.

T rows (tokens of all slices, packed), D width, d a rank's own of it, V vocabulary, P positions.
"""

from __future__ import annotations

import torch

from ppserve.model.backend import AttentionWeights, MLPWeights
from ppserve.model.inputs import StepInputs
from ppserve.model.weights import Outputs, WeightReader


class Embedding:
    """The token's vector, and its position's where the model has learned some. A tensor rank has some columns."""

    def __init__(self, read: WeightReader) -> None:
        self._columns = read.layout.cut(read.arch.width)
        self._multiplier = read.arch.embedding_multiplier
        self._tokens_Vd = read.embedding("wte.weight", self._columns.own)
        learned = read.arch.has_learned_positions
        self._positions_Pd = read.embedding("wpe.weight", self._columns.own) if learned else None

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        own_Td = self._tokens_Vd[inputs.token_ids_T]
        if self._positions_Pd is not None:
            own_Td += self._positions_Pd[inputs.positions_T]
        if self._multiplier != 1:
            own_Td *= self._multiplier
        return inputs.gather.all(own_Td, self._columns)


def read_attention(read: WeightReader, layer: int) -> AttentionWeights:
    """A tensor rank has some heads of keys and values, and the queries that read them."""
    arch, layout, name = read.arch, read.layout, f"h.{layer}.attn"
    spec = arch.layers[layer].attention
    heads, kv_heads = (cut.times(spec.head_size) for cut in (layout.heads(arch), layout.kv_heads(arch)))
    columns = layout.cut(arch.width)
    own = heads.own, kv_heads.own, kv_heads.own
    outputs: list[Outputs] = [(f"{name}.{part}", rows) for part, rows in zip("qkv", own, strict=True)]
    if read.has(f"{name}.qkv"):
        begins = 0, heads.size, heads.size + kv_heads.size
        outputs = [(f"{name}.qkv", _moved(rows, begin)) for rows, begin in zip(own, begins, strict=True)]
    norm = read.norm(f"h.{layer}.ln_1", arch.layers[layer].pre_norm)
    qkv = read.linear(*outputs)
    head_norms = None
    if spec.head_norm is not None:
        head_norms = read.norm(f"{name}.q_norm", spec.head_norm), read.norm(f"{name}.k_norm", spec.head_norm)
    proj = read.linear((f"{name}.o", columns.own))
    number = layer - layout.attentions.start
    return AttentionWeights(number, spec.scale, norm, qkv, proj, heads, columns, spec.head_size, head_norms)


def read_mlp(read: WeightReader, layer: int) -> MLPWeights:
    """A tensor rank has some outputs of each matrix."""
    arch, layout, name = read.arch, read.layout, f"h.{layer}.mlp"
    spec = arch.layers[layer].mlp
    inner, columns = layout.cut(spec.inner_width), layout.cut(arch.width)
    norm = read.norm(f"h.{layer}.ln_2", arch.layers[layer].pre_norm)
    firsts = ("gate", "up") if spec.is_gated else ("up",)
    expand = read.linear(*((f"{name}.{part}", inner.own) for part in firsts))
    contract = read.linear((f"{name}.down", columns.own))
    return MLPWeights(norm, expand, spec.activation, contract, inner, columns, spec.is_gated)


def _moved(rows: slice, begin: int) -> slice:
    return slice(begin + rows.start, begin + rows.stop)
