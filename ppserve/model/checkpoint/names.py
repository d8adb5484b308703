"""The canonical names of a GPT-2's tensors and the shapes that its architecture demands."""

from __future__ import annotations

import re

from ppserve.core.architecture import Architecture

LINEARS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
NORMS = ("ln_1", "ln_2")

LAYER_NAME = re.compile(r"h\.(0|[1-9][0-9]{0,5})\.(.+)")
"""The tensor of a layer. Layer numbers have no leading zeros, so that h.01 is never taken for h.1."""


def tensor_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every canonical name with its shape; linear weights are (out, in)."""
    width = arch.width
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (arch.padded_vocab_size, width),
        "wpe.weight": (arch.max_positions, width),
    }
    for layer in range(arch.num_layers):
        for name, shape in block_shapes(arch).items():
            shapes[f"h.{layer}.{name}"] = shape
    shapes["ln_f.weight"] = (width,)
    if arch.biases:
        shapes["ln_f.bias"] = (width,)
    shapes["lm_head.weight"] = (arch.padded_vocab_size, width)
    return shapes


def block_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer, without the `h.{i}.` in front."""
    width, inner = arch.width, arch.inner_width
    out_in = {
        "attn.c_attn": (3 * width, width),
        "attn.c_proj": (width, width),
        "mlp.c_fc": (inner, width),
        "mlp.c_proj": (width, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name in NORMS:
        shapes[f"{name}.weight"] = (width,)
        if arch.biases:
            shapes[f"{name}.bias"] = (width,)
    for name in LINEARS:
        shapes[f"{name}.weight"] = out_in[name]
        if arch.biases:
            shapes[f"{name}.bias"] = out_in[name][:1]
    return shapes


def is_linear_weight(name: str) -> bool:
    """Whether a canonical name is that of a linear's weight inside a layer."""
    match = LAYER_NAME.fullmatch(name)
    return match is not None and match[2] in {f"{linear}.weight" for linear in LINEARS}
