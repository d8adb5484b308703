"""llm.c's `gpt2_124M.bin`: a header of 256 integers, then every tensor, each stacked over the layers.

Offsets follow from the header alone, so the file's size is checked against it. Linears are (out, in), the head is
tied, GELU is the tanh form, layer norm's epsilon is 1e-5.
(Layout: karpathy/llm.c, train_gpt2.py, write_model.)
"""

from __future__ import annotations

import math
import struct
from functools import partial
from pathlib import Path

import msgspec
import torch

from ppserve.core.architecture import Architecture
from ppserve.errors import CheckpointError
from ppserve.files import checked, file_size, read_start, reason
from ppserve.model.checkpoint.fields import END_OF_TEXT, Layers, Positions, Rows, Width, check_heads, known_id
from ppserve.model.checkpoint.names import layer_shapes
from ppserve.model.checkpoint.tensors import DTYPES, FileCheckpoint, StoredTensor

MAGIC = 20240326
HEADER_BYTES = 256 * 4
STORED_DTYPES = {3: "float32", 5: "bfloat16"}
"""By version. llm.c itself no longer reads versions 1, 2 and 4."""


class Header(msgspec.Struct, frozen=True):
    """The integers of the header that are used, in their order, by llm.c's names."""

    magic: int
    version: int
    maxT: Positions
    V: Rows
    """Real tokens."""
    L: Layers
    NH: Width
    C: Width
    Vp: Rows
    """Rows of the embedding."""


def read_header(path: Path) -> tuple[Architecture, str]:
    """The architecture and the stored dtype. Raises CheckpointError naming the header's field."""
    content = read_start(path, HEADER_BYTES)
    if len(content) < HEADER_BYTES:
        raise CheckpointError(path, f"is shorter than the header's {HEADER_BYTES} bytes", field="header")
    numbers = dict(zip(Header.__struct_fields__, struct.unpack_from("<8i", content), strict=True))
    magic, version = numbers["magic"], numbers["version"]
    if magic != MAGIC:
        raise CheckpointError(path, f"is {magic}, not {MAGIC}: not a GPT-2 of llm.c", field="magic")
    if version not in STORED_DTYPES:
        problem = f"is {version}; 3 (float32) and 5 (bfloat16) are served"
        raise CheckpointError(path, problem, field="version")
    return _architecture(path, checked(path, numbers, Header)), STORED_DTYPES[version]


def open_llmc(path: Path) -> FileCheckpoint:
    """Open a .bin of version 3 (float32) or 5 (bfloat16). Raises CheckpointError."""
    arch, dtype = read_header(path)
    tensors = _stored_tensors(path, arch, dtype)
    tensors["lm_head.weight"] = tensors["wte.weight"]
    return FileCheckpoint(path, arch, tensors)


def _architecture(path: Path, header: Header) -> Architecture:
    if header.Vp < header.V:
        raise CheckpointError(path, f"is {header.Vp}, less than the {header.V} of V", field="Vp")
    arch = Architecture(
        num_layers=header.L,
        width=header.C,
        num_heads=header.NH,
        max_positions=header.maxT,
        vocab_size=header.V,
        padded_vocab_size=header.Vp,
        inner_width=4 * header.C,
        activation="gelu_new",
        eos_id=known_id(END_OF_TEXT, header.V),
    )
    check_heads(path, arch, "NH")
    return arch


def _stored_tensors(path: Path, arch: Architecture, dtype: str) -> dict[str, StoredTensor]:
    """Every tensor follows the one before; the last one must end where the file ends."""
    width = arch.width
    order: dict[str, tuple[int, ...]] = {
        "wte.weight": (arch.padded_vocab_size, width),
        "wpe.weight": (arch.max_positions, width),
    }
    order |= {f"h.{i}.{name}": s for name, s in layer_shapes(arch).items() for i in range(arch.num_layers)}
    order |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    itemsize = DTYPES[dtype].itemsize
    tensors, begin = {}, HEADER_BYTES // itemsize
    for name, shape in order.items():
        mapped = partial(_map_tensor, path, begin, shape, DTYPES[dtype])
        tensors[name] = StoredTensor(path, name, shape, dtype, mapped)
        begin += math.prod(shape)
    size = file_size(path)
    if size != begin * itemsize:
        raise CheckpointError(path, f"is {size} bytes long; its header asks for {begin * itemsize}", field="size")
    return tensors


def _map_tensor(path: Path, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """begin: numbers before it in the file, the header counted as numbers."""
    end = begin + math.prod(shape)
    try:
        return torch.from_file(str(path), shared=False, size=end, dtype=dtype)[begin:].view(shape)
    except RuntimeError as error:
        raise CheckpointError(path, f"cannot be read: removed or truncated ({reason(error)})") from error
