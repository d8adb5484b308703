"""Writes a GPT-2 with seeded random weights and a real vocabulary, as a Hugging Face directory.

    python -m tools.make_random_gpt2 DIR --vocabulary gpt2.tiktoken            124M parameters, float32
    python -m tools.make_random_gpt2 DIR --vocabulary gpt2.tiktoken --layers 4 --width 64 --heads 4

For measuring and testing where no trained checkpoint can be had. The vocabulary is read from tiktoken's format
and written as vocab.json, merges.txt and tokenizer.json; `write_llmc_vocabulary` writes llm.c's format too.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from tools.byte_pairs import recover_merges

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model; those of GPT-2 124M unless told otherwise."""

    num_layers: int = 12
    width: int = 768
    num_heads: int = 12
    max_positions: int = 1024
    vocab_size: int = 50257


def gpt2_config(
    *, num_layers: int, width: int, num_heads: int, max_positions: int, vocab_size: int, dtype: str
) -> dict[str, object]:
    """A `config.json` of Hugging Face: tied embeddings, GPT-2's own GELU. The last token is `<|endoftext|>`."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": num_layers,
        "n_embd": width,
        "n_head": num_heads,
        "n_positions": max_positions,
        "n_ctx": max_positions,
        "vocab_size": vocab_size,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": vocab_size - 1,
        "eos_token_id": vocab_size - 1,
        "dtype": dtype,
    }


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes -> rank, from lines of base64 token and rank."""
    pairs = (line.split() for line in path.read_bytes().splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def _alphabet() -> dict[int, str]:
    plain = [b for b in range(256) if chr(b).isprintable() and b != 0x20]
    hidden = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(0x100 + i) for i, b in enumerate(hidden)}


ALPHABET = _alphabet()


def spell(token: bytes) -> str:
    """A token in GPT-2's printable alphabet: unprintable bytes become characters from U+0100 on."""
    return "".join(ALPHABET[b] for b in token)


def write_hugging_face_vocabulary(ranks: Mapping[bytes, int], directory: Path) -> None:
    """vocab.json, merges.txt, tokenizer.json and tokenizer_config.json; `<|endoftext|>` follows the last rank."""
    end_of_text = len(ranks)
    spelled = {spell(token): rank for token, rank in sorted(ranks.items(), key=lambda item: item[1])}
    vocab = spelled | {END_OF_TEXT: end_of_text}
    merges = [f"{spell(first)} {spell(second)}" for first, second in recover_merges(ranks)]
    marks = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": end_of_text, "content": END_OF_TEXT} | marks],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_llmc_vocabulary(ranks: Mapping[bytes, int], path: Path, version: int = 2) -> None:
    """llm.c's `gpt2_tokenizer.bin`: 256 header words, then one length byte and the bytes of every token."""
    tokens = [*sorted(ranks, key=ranks.__getitem__), END_OF_TEXT.encode()]
    header = [20240328, version, len(tokens), len(tokens) - 1 if version == 2 else 0]
    body = b"".join(bytes([len(token)]) + token for token in tokens)
    path.write_bytes(struct.pack("<256I", *header, *[0] * (256 - len(header))) + body)


def random_tensors(shape: Shape, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """GPT-2's initialisation: deviation 0.02, and 0.02 / sqrt(2 layers) where a block adds to its input."""
    generator = torch.Generator().manual_seed(seed)
    d = shape.width

    def normal(*size: int, std: float = 0.02) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * std).to(dtype)

    def linear(name: str, num_in: int, num_out: int, std: float = 0.02) -> dict[str, torch.Tensor]:
        weight = normal(num_in, num_out, std=std)
        return {f"{name}.weight": weight, f"{name}.bias": torch.zeros(num_out, dtype=dtype)}

    def norm(name: str) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": torch.ones(d, dtype=dtype), f"{name}.bias": torch.zeros(d, dtype=dtype)}

    added_std = 0.02 / math.sqrt(2 * shape.num_layers)
    tensors = {"transformer.wte.weight": normal(shape.vocab_size, d)}
    tensors["transformer.wpe.weight"] = normal(shape.max_positions, d)
    for layer in range(shape.num_layers):
        block = f"transformer.h.{layer}"
        tensors |= norm(f"{block}.ln_1") | linear(f"{block}.attn.c_attn", d, 3 * d)
        tensors |= linear(f"{block}.attn.c_proj", d, d, added_std)
        tensors |= norm(f"{block}.ln_2") | linear(f"{block}.mlp.c_fc", d, 4 * d)
        tensors |= linear(f"{block}.mlp.c_proj", 4 * d, d, added_std)
    return tensors | norm("transformer.ln_f")


def write_checkpoint(directory: Path, shape: Shape, seed: int = 0, dtype: str = "float32") -> None:
    """config.json and model.safetensors; linear weights (in, out), embeddings tied."""
    directory.mkdir(parents=True, exist_ok=True)
    config = gpt2_config(**asdict(shape), dtype=dtype)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = random_tensors(shape, seed, getattr(torch, dtype))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--vocabulary", type=Path, required=True, help="a .tiktoken file")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    if a.width % a.heads:
        parser.error(f"--width {a.width} is not a multiple of --heads {a.heads}")
    ranks = read_ranks(a.vocabulary)
    write_hugging_face_vocabulary(ranks, a.directory)
    shape = Shape(a.layers, a.width, a.heads, a.positions, vocab_size=len(ranks) + 1)
    write_checkpoint(a.directory, shape, a.seed, a.dtype)


if __name__ == "__main__":
    main()
