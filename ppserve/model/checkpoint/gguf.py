"""GGUF: one file with the settings, the tensors and the tokenizer, as llama.cpp's converters write it.

Linears are (out, in). Quantized tensors are dequantized, a part at a time, when they are read. GELU is tanh's.
(Layout: ggml-org/ggml, docs/gguf.md; names: gguf-py, constants.py.)
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from ppserve.core.architecture import Architecture
from ppserve.errors import CheckpointError
from ppserve.files import checked, shown
from ppserve.gguf_file import TensorInfo, read_header
from ppserve.model.checkpoint.settings import InnerWidth, Layers, Positions, Width, settled
from ppserve.model.checkpoint.tensors import FileCheckpoint, StoredTensor

DTYPES_BY_TYPE = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
DEQUANTIZED = frozenset({Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q4_K, Type.Q5_K, Type.Q6_K})
UNUSED_TOKEN = 5
"""The type of a token that pads the vocabulary."""

NAMES = {
    "token_embd": "wte",
    "position_embd": "wpe",
    "output_norm": "ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
"""The converters' names of GPT-2's tensors, without `blk.{i}.` in front."""


class Settings(msgspec.Struct, frozen=True):
    """The keys of a GPT-2 that are read, without `gpt2.` in front."""

    block_count: Layers
    embedding_length: Width
    context_length: Positions
    head_count: Width = msgspec.field(name="attention.head_count")
    layer_norm_epsilon: float = msgspec.field(name="attention.layer_norm_epsilon")
    feed_forward_length: InnerWidth


class Quantized:
    """The numbers of a tensor that is dequantized where it is sliced: blocks along the last dimension."""

    def __init__(self, blocks: np.ndarray[Any, Any], kind: Type) -> None:
        self._blocks, self._kind = blocks, kind

    def __getitem__(self, part: Any) -> torch.Tensor:
        rows, *columns = part if isinstance(part, tuple) else (part,)
        numbers = gguf.quants.dequantize(np.ascontiguousarray(self._blocks[rows]), self._kind)
        return torch.from_numpy(numbers)[(..., *columns)]


def open_gguf(path: Path) -> FileCheckpoint:
    """Open a .gguf of a GPT-2. Raises CheckpointError."""
    header = read_header(path)
    content = np.memmap(path, mode="c")
    stored = [_stored(path, content, tensor) for tensor in header.tensors]
    rows = next((tensor.shape[0] for tensor in header.tensors if tensor.name == "token_embd.weight"), 0)
    return FileCheckpoint(path, _architecture(path, header.values, rows), stored, _canonical)


def _architecture(path: Path, values: dict[str, Any], num_rows: int) -> Architecture:
    family = values.get("general.architecture")
    if family != "gpt2":
        raise CheckpointError(path, f"is {shown(family)}; only gpt2 is served", field="general.architecture")
    own = {name.removeprefix("gpt2."): value for name, value in values.items() if name.startswith("gpt2.")}
    settings = checked(path, own, Settings)
    token_types = values.get("tokenizer.ggml.token_type") or []
    num_unused = next((i for i, kind in enumerate(reversed(token_types)) if kind != UNUSED_TOKEN), 0)
    arch = Architecture(
        num_layers=settings.block_count,
        width=settings.embedding_length,
        num_heads=settings.head_count,
        max_positions=settings.context_length,
        vocab_size=num_rows - num_unused,
        padded_vocab_size=num_rows,
        inner_width=settings.feed_forward_length,
        activation="gelu_new",
        layer_norm_epsilon=float(str(np.float32(settings.layer_norm_epsilon))),  # 1e-5, stored as float32
        eos_id=values.get("tokenizer.ggml.eos_token_id"),
    )
    return settled(path, arch, "gpt2.attention.head_count")


def _stored(path: Path, content: np.ndarray[Any, Any], tensor: TensorInfo) -> StoredTensor:
    """Raises CheckpointError where the file ends within it, or its type cannot be read."""
    if tensor.type not in DTYPES_BY_TYPE and tensor.type not in DEQUANTIZED:
        raise CheckpointError(path, f"has the type {tensor.type}, which cannot be read", field=shown(tensor.name))
    numbers_per_block, block_bytes = gguf.GGML_QUANT_SIZES[Type(tensor.type)]
    *outer, width = tensor.shape
    row_bytes, remainder = divmod(width * block_bytes, numbers_per_block)
    end = tensor.offset + math.prod(outer) * row_bytes
    if not row_bytes or remainder or end > len(content) or tensor.offset % 4:
        problem = f"of the shape {tensor.shape} and the type {tensor.type} cannot begin at byte {tensor.offset}"
        raise CheckpointError(path, problem, field=shown(tensor.name))
    blocks = content[tensor.offset : end].reshape(*outer, row_bytes)
    dtype = DTYPES_BY_TYPE.get(tensor.type, torch.float32)
    is_plain = tensor.type in DTYPES_BY_TYPE
    numbers = torch.from_numpy(blocks).view(dtype) if is_plain else Quantized(blocks, Type(tensor.type))
    return StoredTensor(path, tensor.name, tensor.shape, str(dtype).removeprefix("torch."), numbers)


def _canonical(stored_name: str) -> str:
    match = re.fullmatch(r"(blk\.(\d+)\.)?(\w+)\.(weight|bias)", stored_name)
    if not match or match[3] not in NAMES:
        return stored_name
    return f"{f'h.{match[2]}.' if match[1] else ''}{NAMES[match[3]]}.{match[4]}"
