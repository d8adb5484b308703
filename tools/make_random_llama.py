"""Writes a Llama with seeded random weights of 4 bits, as a GGUF: for measuring what no machine at hand holds.

    python -m tools.make_random_llama FILE.gguf                                   7.4 billion parameters, 4 GB
    python -m tools.make_random_llama FILE.gguf --layers 22 --width 2048 --kv-heads 4 --inner 5632     1.2 billion

One tensor at a time is in memory. The tokenizer is SmolLM2's (`ppserve fetch smollm2`).
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from ppserve.gguf_file import read_header
from ppserve.model.checkpoint.opening import find_model

SIZES = {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "inner": 14336, "seed": 0}
STD = 0.02
_GROUP, _NUMBER_BYTES = 32, 16
# Two numbers a byte, each 8 above what its scale multiplies: without 0 they are symmetric, or all outputs would
# have a part in common.
_SYMMETRIC = np.array([(n & 15 or 8) | (n >> 4 or 8) << 4 for n in range(256)], np.uint8)
_NUMBERS_STD = math.sqrt(2 * sum(n * n for n in range(8)) / 16)


def random_q4_0(rng: np.random.Generator, outputs: int, inputs: int, std: float) -> np.ndarray:
    """Blocks of Q4_0: a scale in float16, then 32 numbers."""
    num_groups = outputs * inputs // _GROUP
    scales = (rng.uniform(0.5, 1.5, num_groups) * std / _NUMBERS_STD).astype(np.float16)
    numbers = rng.integers(0, 256, num_groups * _NUMBER_BYTES, np.uint8)
    np.take(_SYMMETRIC, numbers, out=numbers)
    blocks = scales.view(np.uint8).reshape(-1, 2), numbers.reshape(-1, _NUMBER_BYTES)
    return np.concatenate(blocks, axis=1).reshape(outputs, -1)


def matrices(layers: int, width: int, keys: int, inner: int, vocabulary: int) -> dict[str, tuple[int, int, float]]:
    """Outputs, inputs and deviation of each by its name; keys: outputs of the keys, and of the values."""
    added_std = STD / math.sqrt(2 * layers)
    found = {"token_embd": (vocabulary, width, STD), "output": (vocabulary, width, STD)}
    for layer in range(layers):
        of_layer = {
            "attn_q": (width, width, STD),
            "attn_k": (keys, width, STD),
            "attn_v": (keys, width, STD),
            "attn_output": (width, width, added_std),
            "ffn_gate": (inner, width, STD),
            "ffn_up": (inner, width, STD),
            "ffn_down": (width, inner, added_std),
        }
        found |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    return found


def write(
    path: Path, *, layers: int, width: int, heads: int, kv_heads: int, inner: int, seed: int = 0,
    tokenizer: Path | None = None,
) -> int:  # fmt: skip
    """Returns the number of parameters. tokenizer: of a GGUF; None for that of `smollm2`."""
    values = read_header(tokenizer or find_model("smollm2")).values
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in values.items():
        if key.startswith("tokenizer."):
            kind = gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind)
    vocabulary = len(values["tokenizer.ggml.tokens"])
    norms = [f"blk.{layer}.{name}_norm" for layer in range(layers) for name in ("attn", "ffn")] + ["output_norm"]
    shapes = matrices(layers, width, width // heads * kv_heads, inner, vocabulary)
    for name in norms:
        writer.add_tensor_info(f"{name}.weight", (width,), np.dtype(np.float32), 4 * width)
    for name, (outputs, inputs, _) in shapes.items():
        row_bytes = inputs // _GROUP * (2 + _NUMBER_BYTES)
        blocks = (outputs, row_bytes), np.dtype(np.uint8), outputs * row_bytes
        writer.add_tensor_info(f"{name}.weight", *blocks, raw_dtype=Type.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    for _ in norms:
        writer.write_tensor_data(np.ones(width, np.float32))
    for outputs, inputs, std in shapes.values():
        writer.write_tensor_data(random_q4_0(rng, outputs, inputs, std))
    writer.close()
    return len(norms) * width + sum(outputs * inputs for outputs, inputs, _ in shapes.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    flags = vars(parser.parse_args())
    path = flags.pop("file")
    print(f"{write(path, **flags) / 1e9:.2f} billion parameters in {path}")


if __name__ == "__main__":
    main()
