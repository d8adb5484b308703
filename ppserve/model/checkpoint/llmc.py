"""llm.c's `gpt2_124M.bin`: a header of 256 integers, then every tensor, each stacked over the layers.

The header implies the file's size, which is checked. Linear layers are (out, in), the LM head is tied, GELU is the
tanh form, and the epsilon of layer norms is 1e-5. (Layout: karpathy/llm.c, train_gpt2.py, write_model.)
"""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from ppserve.core.architecture import Architecture
from ppserve.errors import CheckpointError
from ppserve.files import bytes_shown, checked, file_size, misread, read_start
from ppserve.model.checkpoint.families import layer_shapes, tensor_shapes
from ppserve.model.checkpoint.gpt2 import GPT2Config
from ppserve.model.checkpoint.settings import Layers, Positions, Rows, Width, check_heads, checked_architecture
from ppserve.model.checkpoint.tensors import DTYPES, FileCheckpoint, StoredTensor

MAGIC = 20240326
HEADER_BYTES = 256 * 4
STORED_DTYPES = {3: "float32", 5: "bfloat16"}
"""The stored type, by the file's version. llm.c itself no longer reads versions 1, 2 and 4."""


class Header(msgspec.Struct, frozen=True):
    """The integers of the header that are used, in their order, with llm.c's names."""

    magic: int
    version: int
    maxT: Positions
    V: Rows
    """The number of real tokens."""
    L: Layers
    NH: Width
    C: Width
    Vp: Rows
    """The number of rows of the embedding, padding included."""


def open_llmc(path: Path) -> FileCheckpoint:
    """Open a .bin of version 3 (float32) or 5 (bfloat16). Raises CheckpointError."""
    arch, dtype = _read_header(path)
    return FileCheckpoint(path, arch, _stored_tensors(path, arch, dtype))


def _read_header(path: Path) -> tuple[Architecture, str]:
    """Return the architecture and the stored dtype. Raises CheckpointError, which names the header's field."""
    content = read_start(path, HEADER_BYTES)
    magic = MAGIC.to_bytes(4, "little")
    if not content.startswith(magic):
        expected = f"llm.c's begin with {bytes_shown(magic)}, GGUF's with 'GGUF', and others lie in a directory"
        raise misread(path, "a model that is served", expected)
    if len(content) < HEADER_BYTES:
        raise misread(path, "a model that is served", f"not even the {HEADER_BYTES} bytes of llm.c's header")
    numbers = dict(zip(Header.__struct_fields__, struct.unpack_from("<8i", content), strict=True))
    version = numbers["version"]
    if version not in STORED_DTYPES:
        problem = f"is {version}; 3 (float32) and 5 (bfloat16) are served"
        raise CheckpointError(path, problem, field="version")
    return _architecture(path, checked(path, numbers, Header)), STORED_DTYPES[version]


def _architecture(path: Path, header: Header) -> Architecture:
    if header.Vp < header.V:
        raise CheckpointError(path, f"is {header.Vp}, less than the {header.V} of V", field="Vp")
    check_heads(path, header.C, header.NH, "NH")
    config = GPT2Config(
        n_layer=header.L, n_embd=header.C, n_head=header.NH, n_positions=header.maxT, vocab_size=header.Vp
    )
    return checked_architecture(path, replace(config.architecture(path), vocab_size=header.V), "NH")


def _stored_tensors(path: Path, arch: Architecture, dtype: str) -> list[StoredTensor]:
    """Return the tensors. They follow each other; the last must end where the file ends. Raises
    CheckpointError."""
    layers = [f"h.{i}.{name}" for name in layer_shapes(arch, 0) for i in range(arch.num_layers)]
    names = ("wte.weight", "wpe.weight", *layers, "ln_f.weight", "ln_f.bias")
    shapes, itemsize = tensor_shapes(arch), DTYPES[dtype].itemsize
    sizes = [math.prod(shapes[name]) for name in names]
    begin, total = HEADER_BYTES // itemsize, sum(sizes)
    size, expected = file_size(path), (begin + total) * itemsize
    if size != expected:
        raise CheckpointError(path, f"is {size} bytes long; its header asks for {expected}", field="size")
    numbers = torch.from_file(str(path), shared=False, size=begin + total, dtype=DTYPES[dtype])[begin:]
    each = zip(names, torch.split(numbers, sizes), strict=True)
    return [StoredTensor(path, name, shapes[name], dtype, of.view(shapes[name])) for name, of in each]
