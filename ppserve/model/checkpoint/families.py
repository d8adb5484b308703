"""The families of models, and the names and shapes of their tensors, which follow from the layers'
specifications."""

from __future__ import annotations

from ppserve.core.architecture import Architecture
from ppserve.core.layers import AttentionSpec, MLPSpec, NormSpec
from ppserve.model.checkpoint import Shapes, gpt2, llama

FAMILIES = {"gpt2": gpt2.FAMILY, "llama": llama.FAMILY}
"""The families, by `Architecture.family`."""


def tensor_shapes(arch: Architecture) -> Shapes:
    """Return the shapes of all tensors by their canonical names. Weights of linear layers are (out, in). A tied LM
    head is listed too."""
    width, vocabulary = arch.width, arch.padded_vocab_size
    positions: Shapes = {"wpe.weight": (arch.max_positions, width)} if arch.has_learned_positions else {}
    layers = (layer_shapes(arch, i).items() for i in range(arch.num_layers))
    return {
        "wte.weight": (vocabulary, width),
        **positions,
        **{f"h.{i}.{name}": shape for i, layer in enumerate(layers) for name, shape in layer},
        **_norm("ln_f", arch.final_norm, width),
        "lm_head.weight": (vocabulary, width),
    }


def layer_shapes(arch: Architecture, layer: int) -> Shapes:
    """Return the shapes of one layer's tensors, in the order of their use, by names without `h.{i}.` in front."""
    spec, width = arch.layers[layer], arch.width
    return {
        **_norm("ln_1", spec.pre_norm, width),
        **_attention(spec.attention, width, "attn.qkv" in FAMILIES[arch.family].names),
        **_norm("post_ln_1", spec.post_norm, width),
        **_norm("ln_2", spec.pre_norm, width),
        **_mlp(spec.mlp, width),
        **_norm("post_ln_2", spec.post_norm, width),
    }


def _attention(spec: AttentionSpec, width: int, is_one_matrix: bool) -> Shapes:
    """Return the tensors of an attention. is_one_matrix: queries, keys and values are outputs of one matrix,
    `attn.qkv`."""
    queries, keys = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    outputs = {"attn.q": queries, "attn.k": keys, "attn.v": keys}
    if is_one_matrix:
        outputs = {"attn.qkv": sum(outputs.values())}
    return {
        **_linears({name: (size, width) for name, size in outputs.items()}, spec.has_qkv_biases),
        **_norm("attn.q_norm", spec.head_norm, spec.head_size),
        **_norm("attn.k_norm", spec.head_norm, spec.head_size),
        **_linears({"attn.o": (width, queries)}, spec.has_output_bias),
    }


def _mlp(spec: MLPSpec, width: int) -> Shapes:
    inner = spec.inner_width
    gate: Shapes = {"mlp.gate": (inner, width)} if spec.is_gated else {}
    return _linears({**gate, "mlp.up": (inner, width), "mlp.down": (width, inner)}, spec.has_biases)


def _linears(weights: Shapes, have_biases: bool) -> Shapes:
    """Return these weights and, if they have biases, for each a bias of as many numbers as it has outputs."""
    shapes: Shapes = {}
    for name, shape in weights.items():
        shapes[f"{name}.weight"] = shape
        if have_biases:
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def _norm(name: str, spec: NormSpec | None, size: int) -> Shapes:
    return {} if spec is None else _linears({name: (size,)}, spec.has_bias)
