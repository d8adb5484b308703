"""The families of models, and the names and shapes of their tensors."""

from __future__ import annotations

from ppserve.core.architecture import Architecture
from ppserve.model.checkpoint import Shapes, gpt2, llama, with_biases

FAMILIES = {"gpt2": gpt2.FAMILY, "llama": llama.FAMILY}
"""The families, by `Architecture.family`."""


def tensor_shapes(arch: Architecture) -> Shapes:
    """Every canonical name with its shape. Linear weights are (out, in); a tied head is the embedding."""
    width, vocabulary, layers = arch.width, arch.padded_vocab_size, FAMILIES[arch.family].layer_shapes(arch)
    positions: Shapes = {"wpe.weight": (arch.max_positions, width)} if arch.rotary is None else {}
    return {
        "wte.weight": (vocabulary, width),
        **positions,
        **{f"h.{i}.{name}": shape for i in range(arch.num_layers) for name, shape in layers.items()},
        **with_biases({"ln_f": (width,)}, arch.biases),
        "lm_head.weight": (vocabulary, width),
    }
