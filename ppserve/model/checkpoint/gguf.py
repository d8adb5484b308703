"""GGUF: one file with the settings, the tensors and the tokenizer, as llama.cpp's converters write it.

Linear layers are (out, in). Quantized tensors are dequantized when they are read. GELU is the tanh form.
(Layout: ggml-org/ggml, docs/gguf.md; names: gguf-py, constants.py.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from ppserve.core.architecture import Architecture
from ppserve.errors import CheckpointError
from ppserve.files import shown
from ppserve.gguf_file import GGUFHeader, TensorInfo, read_parts
from ppserve.model.checkpoint import FourBits
from ppserve.model.checkpoint.config_json import declared, family_of
from ppserve.model.checkpoint.families import FAMILIES
from ppserve.model.checkpoint.settings import checked_architecture
from ppserve.model.checkpoint.tensors import DTYPES, FileCheckpoint, StoredRows, StoredTensor

DTYPES_BY_TYPE: dict[int, str] = {Type.F32: "float32", Type.F16: "float16", Type.BF16: "bfloat16"}
TYPES = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS".split()  # noqa: SIM905
MAX_EXPERTS = 1024
UNUSED_TOKEN = 5
"""The type of a token that pads the vocabulary."""

REQUIRED = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
}
"""Keys that a GGUF must have, without the architecture's name in front, and their names in config.json."""

OPTIONAL = {
    "feed_forward_length": "intermediate_size",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
ROTARY = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
"""Keys that config.json has together, as `rope_scaling`, and their names there."""
HEAD_SIZES = ("attention.value_length", "rope.dimension_count")
SEPARATE = frozenset(
    {*ROTARY, *HEAD_SIZES, "attention.scale", "vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
)
"""Keys that have no counterpart in config.json. The last three change nothing."""
SCALES = frozenset(
    """logit_scale residual_scale embedding_scale expert_weights_scale attention.output_scale rope.scale_linear
    rope.scaling.attn_factor rope.scaling.yarn_attn_factor attention.sliding_window""".split()  # noqa: SIM905
)
"""Keys for which the values 0 and 1 change nothing."""
ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Keys of the tokens that end a text, a turn, a message, or a filled-in middle."""
END_TOKENS = frozenset(
    """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s>
    <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response>
    <｜end▁of▁sentence｜> [e~[ <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo>
    <REPO> <reponame> <|file_sep|>
    """.split()  # noqa: SIM905
)
"""Texts of tokens that are ends, as in llama.cpp (llama-vocab.cpp). By its keys, many a file names only the end of
the model that it was trained from."""


class Quantized:
    """The numbers of a quantized tensor: a slice is dequantized when it is asked for. Blocks lie along the last
    dimension."""

    def __init__(self, blocks: np.ndarray[Any, Any], kind: Type) -> None:
        self._blocks = blocks
        self._kind = kind

    def __getitem__(self, part: StoredRows | tuple[StoredRows, slice], /) -> torch.Tensor:
        rows, columns = part if isinstance(part, tuple) else (part, slice(None))
        numbers = gguf.quants.dequantize(self._blocks_of(rows), self._kind)
        return torch.from_numpy(numbers)[..., columns]

    def _blocks_of(self, rows: StoredRows) -> np.ndarray[Any, Any]:
        return np.ascontiguousarray(self._blocks[rows if isinstance(rows, slice) else rows.numpy()])

    def four_bits(self, rows: StoredRows) -> FourBits:
        """Return these rows of a Q4_0 or Q4_1 tensor as they are stored."""
        halves = 1 if self._kind == Type.Q4_0 else 2
        blocks = self._blocks_of(rows)
        blocks = blocks.reshape(len(blocks), -1, 2 * halves + 16)
        factors = np.ascontiguousarray(blocks[:, :, : 2 * halves]).view(np.float16)
        scales, *minima = np.moveaxis(factors, 2, 0)
        packed = blocks[:, :, 2 * halves :]
        numbers = np.concatenate([packed & 15, packed >> 4], axis=2)
        # The numbers of Q4_0 are stored 8 too large.
        minimum = minima[0] if minima else scales * np.float16(-8)
        return FourBits(*map(torch.from_numpy, (numbers, scales.copy(), minimum.copy())))


class Interleaved:
    """The numbers of queries or keys, in Hugging Face's order of rows. A `llama` GGUF interleaves the halves of
    each head."""

    def __init__(self, stored: StoredTensor, head_size: int) -> None:
        self._stored = stored
        self._order = torch.arange(stored.shape[0]).view(-1, head_size // 2, 2).transpose(1, 2).reshape(-1)

    def __getitem__(self, part: StoredRows | tuple[StoredRows, slice], /) -> torch.Tensor:
        if isinstance(part, tuple):
            rows, columns = part
            return self._stored.numbers[self._order[rows], columns]
        return self._stored.numbers[self._order[part]]

    def four_bits(self, rows: StoredRows) -> FourBits:
        assert self._stored.four_bits is not None, "asked of rows in 4 bits alone"
        return self._stored.four_bits(self._order[rows])


def open_gguf(path: Path) -> FileCheckpoint:
    """Open a .gguf. If it is a part of a model, open all parts. Raises CheckpointError."""
    headers = read_parts(path)
    path, values = next((part, header.values) for part, header in headers.items())
    tensors = [tensor for part, header in headers.items() for tensor in _stored_tensors(part, header)]
    stored = {tensor.name: tensor for tensor in tensors}
    if "token_embd.weight" not in stored:
        raise CheckpointError(path, "this tensor is missing", field="token_embd.weight")
    arch = _architecture(path, values, stored)
    if values["general.architecture"] == "llama":
        tensors = [_in_halves(tensor, arch.head_size) for tensor in tensors]
    return FileCheckpoint(path, arch, tensors, FAMILIES[arch.family].gguf_name)


def _in_halves(tensor: StoredTensor, head_size: int) -> StoredTensor:
    if not tensor.name.endswith(("attn_q.weight", "attn_k.weight")) or tensor.shape[0] % head_size:
        return tensor  # if its shape is wrong, it is refused later, by its name
    in_halves = Interleaved(tensor, head_size)
    return replace(tensor, numbers=in_halves, four_bits=tensor.four_bits and in_halves.four_bits)


def _architecture(path: Path, values: dict[str, Any], stored: dict[str, StoredTensor]) -> Architecture:
    """Return the architecture, as if a config.json had the same values. Raises CheckpointError."""
    kind = values.get("general.architecture")
    family = family_of(path, {"model_type": kind}, "general.architecture")
    start = f"{kind}."
    own = {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}
    keys = OPTIONAL | REQUIRED | family.gguf_keys
    for name in (REQUIRED | family.gguf_keys).keys() - own.keys():
        raise CheckpointError(path, "is missing", field=f"{kind}.{name}")
    own = {name: value for name, value in own.items() if name not in SCALES or value not in (0, 1)}
    read = [name for name in own if name not in SEPARATE]
    config = {keys.get(name, name): _as_written(own[name]) for name in read}
    try:
        arch = declared(path, config | _implied(values, own, stored), family)
    except CheckpointError as error:
        names = {family.synonyms.get(theirs, theirs): name for name, theirs in keys.items()}
        field = names.get(error.field or "", error.field)
        raise CheckpointError(path, error.problem, field=f"{kind}.{field}") from error
    for name in HEAD_SIZES:
        if own.get(name, arch.head_size) != arch.head_size:
            problem = f"is {own[name]}; only {arch.head_size}, as of keys, is served"
            raise CheckpointError(path, problem, field=f"{kind}.{name}")
    scale = own.get("attention.scale")
    if scale and not math.isclose(scale, arch.layers[0].attention.scale, rel_tol=1e-6):
        problem = f"is {scale:g}; only {arch.layers[0].attention.scale:g}, by the size of heads, is served"
        raise CheckpointError(path, problem, field=f"{kind}.attention.scale")
    token_types = values.get("tokenizer.ggml.token_type") or []
    num_unused = next((i for i, kind in enumerate(reversed(token_types)) if kind != UNUSED_TOKEN), 0)
    arch = replace(arch, vocab_size=arch.padded_vocab_size - num_unused)
    arch = _with_factors(path, arch, stored.get("rope_freqs.weight"))
    return checked_architecture(path, arch, f"{kind}.attention.head_count")


def _implied(values: dict[str, Any], own: dict[str, Any], stored: dict[str, StoredTensor]) -> dict[str, Any]:
    """Return the keys of config.json that are implied by other keys and by the tensors."""
    scaling = {theirs: _as_written(own[name]) for name, theirs in ROTARY.items() if name in own}
    return {
        "model_type": values["general.architecture"],
        "vocab_size": stored["token_embd.weight"].shape[0],
        "eos_token_id": _ends(values) or None,
        **({"rope_scaling": scaling} if scaling.get("rope_type", "none") != "none" else {}),
        **({"tie_word_embeddings": True} if "output.weight" not in stored else {}),
        **({"use_sliding_window": True} if "attention.sliding_window" in own else {}),
    }


def _ends(values: dict[str, Any]) -> list[int]:
    """Return the ids of tokens that end a text. Those that the file's keys name come first."""
    named = {text: i for i, text in enumerate(values.get("tokenizer.ggml.tokens") or ()) if text in END_TOKENS}
    if {"<|return|>", "<|flush|>"} & named.keys() and {"<|call|>", "<|calls|>"} & named.keys():
        named.pop("<|end|>", None)  # in these models it ends a message, but not a turn
    given = [values.get(f"tokenizer.ggml.{name}_token_id") for name in ENDS]
    return list(dict.fromkeys(end for end in (*given, *named.values()) if end is not None))


def _with_factors(path: Path, arch: Architecture, stored: StoredTensor | None) -> Architecture:
    """Return the architecture with divided frequencies of its rotary positions. stored: the divisors; None: there
    are none. Raises CheckpointError."""
    if not arch.rotaries or stored is None:
        return arch
    rotary, *_ = arch.rotaries
    count = len(rotary.frequencies)
    factors = stored.numbers[:count].double().numpy()
    if stored.shape != (count,) or not ((factors >= 1e-6) & (factors <= 1e12)).all():
        raise CheckpointError(path, f"is not {count} numbers from 1e-6 to 1e12", stored.name)
    divided = np.array(rotary.frequencies) / factors
    scaled = replace(rotary, frequencies=tuple(map(float, divided.astype(np.float32))))
    return arch.with_layers(lambda layer: replace(layer, attention=replace(layer.attention, rotary=scaled)))


def _as_written(value: Any) -> Any:
    """Return a float as it was written in decimal: a GGUF has 1e-5 rounded to float32."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _stored_tensors(path: Path, header: GGUFHeader) -> list[StoredTensor]:
    content = np.memmap(path, mode="c")
    return [stored for tensor in header.tensors for stored in _stored(path, content, tensor)]


def _stored(path: Path, content: np.ndarray[Any, Any], tensor: TensorInfo) -> Iterator[StoredTensor]:
    """Yield a tensor whose numbers are mapped; of a tensor that has a layer's experts, the matrix of each, whose
    number follows `_exps` in its name. Raises CheckpointError if it cannot be read."""
    name = next((kind.name for kind in Type if kind == tensor.type), str(tensor.type))
    if name not in TYPES:
        problem = f"has the type {name}; served are {', '.join(TYPES)}"
        raise CheckpointError(path, problem, field=shown(tensor.name))
    if not 1 <= len(tensor.shape) <= 4:
        problem = f"has {len(tensor.shape)} dimensions, not 1 to 4"
        raise CheckpointError(path, problem, field=shown(tensor.name))
    numbers_per_block, block_bytes = gguf.GGML_QUANT_SIZES[Type(tensor.type)]
    *outer, width = tensor.shape
    row_bytes, remainder = divmod(width * block_bytes, numbers_per_block)
    end = tensor.offset + math.prod(outer) * row_bytes
    if not row_bytes or remainder or end > len(content) or tensor.offset % 4:
        place = f"byte {tensor.offset} of {len(content)}: is the file whole?"
        problem = f"of the shape {shown(tensor.shape)} cannot begin at {place}"
        raise CheckpointError(path, problem, field=shown(tensor.name))
    blocks = content[tensor.offset : end].reshape(*outer, row_bytes)
    stem, experts, kind = tensor.name.rpartition("_exps.")
    if not experts or len(tensor.shape) != 3:
        yield _of_type(path, tensor.name, tensor.shape, blocks, tensor.type)
        return
    if len(blocks) > MAX_EXPERTS:
        problem = f"has {len(blocks)} experts; at most {MAX_EXPERTS} are served"
        raise CheckpointError(path, problem, field=shown(tensor.name))
    for number, of_expert in enumerate(blocks):
        yield _of_type(path, f"{stem}_exps.{number}.{kind}", tensor.shape[1:], of_expert, tensor.type)


def _of_type(
    path: Path, name: str, shape: tuple[int, ...], blocks: np.ndarray[Any, Any], kind: int
) -> StoredTensor:
    """Return a tensor of these blocks. kind: how GGUF numbers its type."""
    dtype = DTYPES_BY_TYPE.get(kind)
    if dtype is not None:
        return StoredTensor(path, name, shape, dtype, torch.from_numpy(blocks).view(DTYPES[dtype]))
    quantized = Quantized(blocks, Type(kind))
    four_bits = quantized.four_bits if kind in (Type.Q4_0, Type.Q4_1) else None
    return StoredTensor(path, name, shape, "float32", quantized, four_bits=four_bits)
