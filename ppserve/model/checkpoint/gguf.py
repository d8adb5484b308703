"""GGUF: one file with the settings, the tensors and the tokenizer, as llama.cpp's converters write it.

Linears are (out, in). Quantized tensors are dequantized, a part at a time, when they are read. GELU is tanh's.
(Layout: ggml-org/ggml, docs/gguf.md; names: gguf-py, constants.py.)
"""

from __future__ import annotations

import math
from dataclasses import replace
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
from ppserve.model.checkpoint import FourBits, llama
from ppserve.model.checkpoint.settings import InnerWidth, Layers, Positions, Width, settled
from ppserve.model.checkpoint.tensors import FileCheckpoint, StoredTensor

DTYPES_BY_TYPE: dict[int, torch.dtype] = {
    Type.F32: torch.float32,
    Type.F16: torch.float16,
    Type.BF16: torch.bfloat16,
}
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


class GGUFSettings(msgspec.Struct, frozen=True):
    """The keys that are read, without the architecture's name in front."""

    block_count: Layers
    embedding_length: Width
    context_length: Positions
    feed_forward_length: InnerWidth
    head_count: Width = msgspec.field(name="attention.head_count")
    layer_norm_epsilon: float | None = msgspec.field(name="attention.layer_norm_epsilon", default=None)
    rms_epsilon: float | None = msgspec.field(name="attention.layer_norm_rms_epsilon", default=None)
    head_count_kv: Width | None = msgspec.field(name="attention.head_count_kv", default=None)
    key_length: Width | None = msgspec.field(name="attention.key_length", default=None)
    value_length: Width | None = msgspec.field(name="attention.value_length", default=None)
    sliding_window: Positions | None = msgspec.field(name="attention.sliding_window", default=None)
    turned: Width | None = msgspec.field(name="rope.dimension_count", default=None)
    freq_base: float = msgspec.field(name="rope.freq_base", default=10000.0)
    scaling: str = msgspec.field(name="rope.scaling.type", default="none")
    scaling_factor: float | None = msgspec.field(name="rope.scaling.factor", default=None)
    original_length: Positions | None = msgspec.field(name="rope.scaling.original_context_length", default=None)


class Quantized:
    """The numbers of a tensor that is dequantized where it is sliced: blocks along the last dimension."""

    def __init__(self, blocks: np.ndarray[Any, Any], kind: Type) -> None:
        self._blocks, self._kind = blocks, kind

    def __getitem__(self, part: Any) -> torch.Tensor:
        rows, *columns = part if isinstance(part, tuple) else (part,)
        numbers = gguf.quants.dequantize(np.ascontiguousarray(self._blocks[rows]), self._kind)
        return torch.from_numpy(numbers)[(..., *columns)]

    def four_bits(self, rows: Any) -> FourBits | None:
        """These rows as they are; None for another type. A number of Q4_0 is 8 above what its scale multiplies."""
        if self._kind not in (Type.Q4_0, Type.Q4_1):
            return None
        halves = 1 if self._kind == Type.Q4_0 else 2
        blocks = np.ascontiguousarray(self._blocks[rows])
        blocks = blocks.reshape(len(blocks), -1, 2 * halves + 16)
        scales, *minima = np.moveaxis(np.ascontiguousarray(blocks[:, :, : 2 * halves]).view(np.float16), 2, 0)
        numbers = np.concatenate([blocks[:, :, 2 * halves :] & 15, blocks[:, :, 2 * halves :] >> 4], axis=2)
        minimum = minima[0] if minima else scales * np.float16(-8)
        return FourBits(*map(torch.from_numpy, (numbers, scales.copy(), minimum.copy())))


class Interleaved:
    """Rows of queries or keys as Hugging Face has them. A GGUF of architecture `llama` interleaves the halves of
    each head."""

    def __init__(self, numbers: Any, num_rows: int, head_size: int) -> None:
        self._numbers = numbers
        self._order = np.arange(num_rows).reshape(-1, head_size // 2, 2).swapaxes(1, 2).reshape(-1)

    def __getitem__(self, part: Any) -> torch.Tensor:
        rows, *columns = part if isinstance(part, tuple) else (part,)
        found: torch.Tensor = self._numbers[(self._order[rows], *columns)]
        return found

    def four_bits(self, rows: Any) -> FourBits | None:
        return self._numbers.four_bits(self._order[rows]) if isinstance(self._numbers, Quantized) else None


def open_gguf(path: Path) -> FileCheckpoint:
    """Open a .gguf. Raises CheckpointError."""
    header = read_header(path)
    content = np.memmap(path, mode="c")
    stored = [_stored(path, content, tensor) for tensor in header.tensors]
    by_name = {tensor.name: tensor for tensor in stored}
    rows = by_name["token_embd.weight"].shape[0] if "token_embd.weight" in by_name else 0
    arch = _architecture(path, header.values, rows, by_name.get("rope_freqs.weight"))
    if arch.family == "gpt2":
        return FileCheckpoint(path, arch, stored, llama.canonical_names("blk.", NAMES))
    arch = replace(arch, tied_embeddings="output.weight" not in by_name)
    if header.values["general.architecture"] == "llama":
        stored = [_in_halves(tensor, arch.head_size) for tensor in stored]
    return FileCheckpoint(path, arch, stored, llama.canonical_names("blk.", llama.GGUF, llama.COMPUTED))


def _in_halves(tensor: StoredTensor, head_size: int) -> StoredTensor:
    if not tensor.name.endswith(("attn_q.weight", "attn_k.weight")) or tensor.shape[0] % head_size:
        return tensor  # another shape is refused by its name
    return replace(tensor, numbers=Interleaved(tensor.numbers, tensor.shape[0], head_size))


def _architecture(
    path: Path, values: dict[str, Any], num_rows: int, factors: StoredTensor | None
) -> Architecture:
    """factors: what the frequencies of rotary positions are divided by."""
    kind = values.get("general.architecture")
    if kind != "gpt2" and kind not in llama.KINDS:
        served = f"served are gpt2, {', '.join(llama.KINDS)}"
        raise CheckpointError(path, f"is {shown(kind)}; {served}", field="general.architecture")
    own = {name.removeprefix(f"{kind}."): value for name, value in values.items() if name.startswith(f"{kind}.")}
    settings = checked(path, own, GGUFSettings)
    token_types = values.get("tokenizer.ggml.token_type") or []
    num_unused = next((i for i, kind in enumerate(reversed(token_types)) if kind != UNUSED_TOKEN), 0)
    epsilon = settings.layer_norm_epsilon if kind == "gpt2" else settings.rms_epsilon
    if epsilon is None:
        raise CheckpointError(path, "is missing", field=f"{kind}.attention.layer_norm(_rms)_epsilon")
    end = values.get("tokenizer.ggml.eos_token_id")
    arch = Architecture(
        num_layers=settings.block_count,
        width=settings.embedding_length,
        num_heads=settings.head_count,
        max_positions=min(settings.context_length, settings.sliding_window or settings.context_length),
        vocab_size=num_rows - num_unused,
        padded_vocab_size=num_rows,
        inner_width=settings.feed_forward_length,
        layer_norm_epsilon=float(str(np.float32(epsilon))),  # 1e-5, stored as float32
        eos_ids=(end,) if isinstance(end, int) else (),
    )
    if kind != "gpt2":
        arch = replace(arch, activation="silu", **_llama_fields(path, str(kind), settings, factors))
    return settled(path, arch, f"{kind}.attention.head_count")


def _llama_fields(
    path: Path, kind: str, settings: GGUFSettings, factors: StoredTensor | None
) -> dict[str, Any]:
    head_size = settings.key_length or settings.embedding_length // settings.head_count
    sizes = {"attention.value_length": settings.value_length, "rope.dimension_count": settings.turned}
    for name, size in sizes.items():
        if size not in (None, head_size):
            problem = f"is {size}; only {head_size}, as of keys, is served"
            raise CheckpointError(path, problem, field=f"{kind}.{name}")
    scaling = {
        "rope_type": "default" if settings.scaling == "none" else settings.scaling,
        "rope_theta": settings.freq_base,
        "factor": settings.scaling_factor,
        "original_max_position_embeddings": settings.original_length,
    }
    rotary = llama.rotary(path, head_size, scaling, settings.context_length)
    if factors is not None and factors.shape == (head_size // 2,):
        divided = np.array(rotary.frequencies) / factors.numbers[:].double().numpy()
        rotary = replace(rotary, frequencies=tuple(float(number) for number in divided.astype(np.float32)))
    more = {"rotary": rotary, "kv_heads": settings.head_count_kv, "head_width": head_size}
    return more | llama.common(kind)


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
