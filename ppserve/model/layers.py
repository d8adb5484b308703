"""The parts of a model as a stage reads them: which tensors make an embedding, an attention and an MLP.

Tensors have canonical names (`model.checkpoint.families.tensor_shapes`). A layer's specification says which it
has.

T rows (tokens of all slices, packed), D width, d a rank's own of it, V vocabulary, P positions.
"""

from __future__ import annotations

import torch

from ppserve.model.backend import AttentionWeights, MLPWeights, OwnLinear, ResidualWeights, SublayerWeights
from ppserve.model.inputs import Inputs, StepInputs
from ppserve.model.weights import Outputs, WeightReader


class Embedding:
    """The embedding: a token's vector, plus its position's vector where the model has learned positions. A tensor
    rank has some of the columns."""

    def __init__(self, read: WeightReader[Inputs, OwnLinear]) -> None:
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


def read_attention_line(read: WeightReader[Inputs, OwnLinear], layer: int) -> ResidualWeights[OwnLinear]:
    """Read a layer's first residual line."""
    return _read_line(read, layer, 1, _read_attention(read, layer))


def read_mlp_line(read: WeightReader[Inputs, OwnLinear], layer: int) -> ResidualWeights[OwnLinear]:
    """Read a layer's second residual line."""
    return _read_line(read, layer, 2, _read_mlp(read, layer))


def _read_line(
    read: WeightReader[Inputs, OwnLinear],
    layer: int,
    number: int,
    of: SublayerWeights[OwnLinear],
) -> ResidualWeights[OwnLinear]:
    """Read the norms around a sublayer, and return its residual line. number: 1 or 2, as in the norms' names."""
    spec = read.arch.layers[layer]
    pre_norm = read.norm(f"h.{layer}.ln_{number}", spec.pre_norm)
    post_norm = read.norm(f"h.{layer}.post_ln_{number}", spec.post_norm)
    return ResidualWeights(pre_norm, of, post_norm, spec.residual_multiplier)


def _read_attention(read: WeightReader[Inputs, OwnLinear], layer: int) -> AttentionWeights[OwnLinear]:
    """Read an attention. A tensor rank has some heads of keys and values, and the heads of queries that read
    them."""
    arch, layout, name = read.arch, read.layout, f"h.{layer}.attn"
    spec = arch.layers[layer].attention
    heads, kv_heads = (cut.times(spec.head_size) for cut in (layout.heads(arch), layout.kv_heads(arch)))
    columns = layout.cut(arch.width)
    own = heads.own, kv_heads.own, kv_heads.own
    outputs: list[Outputs] = [(f"{name}.{part}", rows) for part, rows in zip("qkv", own, strict=True)]
    if read.has(f"{name}.qkv"):
        begins = 0, heads.size, heads.size + kv_heads.size
        outputs = [(f"{name}.qkv", _moved(rows, begin)) for rows, begin in zip(own, begins, strict=True)]
    qkv = read.linear(*outputs)
    of_queries, of_keys = (read.norm(f"{name}.{part}_norm", spec.head_norm) for part in "qk")
    head_norms = None if of_queries is None or of_keys is None else (of_queries, of_keys)
    proj = read.linear((f"{name}.o", columns.own))
    number = layer - layout.attentions.start
    rotary = None if spec.rotary is None else arch.rotaries.index(spec.rotary)
    return AttentionWeights(number, spec, rotary, qkv, proj, heads, columns, head_norms)


def _read_mlp(read: WeightReader[Inputs, OwnLinear], layer: int) -> MLPWeights[OwnLinear]:
    """Read an MLP. A tensor rank has some outputs of each matrix."""
    arch, layout, name = read.arch, read.layout, f"h.{layer}.mlp"
    spec = arch.layers[layer].mlp
    inner, columns = layout.cut(spec.inner_width), layout.cut(arch.width)
    firsts = ("gate", "up") if spec.is_gated else ("up",)
    expand = read.linear(*((f"{name}.{part}", inner.own) for part in firsts))
    contract = read.linear((f"{name}.down", columns.own))
    return MLPWeights(spec, expand, contract, inner, columns)


def _moved(rows: slice, begin: int) -> slice:
    return slice(begin + rows.start, begin + rows.stop)
