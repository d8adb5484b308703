"""The canonical names of a GPT-2's tensors and the shapes that its architecture demands."""

from __future__ import annotations

import re

from ppserve.core.architecture import Architecture

LAYER_NAME = re.compile(r"h\.(0|[1-9][0-9]{0,5})\.(.+)")
"""The tensor of a layer. Layer numbers have no leading zeros, so that h.01 is never taken for h.1."""


def tensor_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every canonical name with its shape; linear weights are (out, in)."""
    width = arch.width
    return {
        "wte.weight": (arch.padded_vocab_size, width),
        "wpe.weight": (arch.max_positions, width),
        **{f"h.{i}.{name}": shape for i in range(arch.num_layers) for name, shape in layer_shapes(arch).items()},
        **_with_bias(arch, "ln_f", (width,)),
        "lm_head.weight": (arch.padded_vocab_size, width),
    }


def layer_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer, without the `h.{i}.` in front, in the order in which they are used."""
    width, inner = arch.width, arch.inner_width
    return {
        **_with_bias(arch, "ln_1", (width,)),
        **_with_bias(arch, "attn.c_attn", (3 * width, width)),
        **_with_bias(arch, "attn.c_proj", (width, width)),
        **_with_bias(arch, "ln_2", (width,)),
        **_with_bias(arch, "mlp.c_fc", (inner, width)),
        **_with_bias(arch, "mlp.c_proj", (width, inner)),
    }


def _with_bias(arch: Architecture, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    weight = {f"{name}.weight": shape}
    return {**weight, f"{name}.bias": shape[:1]} if arch.biases else weight
