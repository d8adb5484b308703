"""llm.c's `gpt2_124M.bin`: a header of 256 integers, then every tensor, each stacked over the layers.

Offsets follow from the header alone, so the file's size is checked first and then only the rows asked for
are read. Linears are (out, in), the head is tied, GELU is the tanh form, layer norm's epsilon is 1e-5.
(Layout: karpathy/llm.c, train_gpt2.py, write_model.)
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import msgspec
import torch

from ppserve.core.architecture import Architecture
from ppserve.errors import CheckpointError
from ppserve.files import checked, file_size, read_start
from ppserve.model.checkpoint.fields import END_OF_TEXT, Layers, Positions, Rows, Width, check_heads, known_id
from ppserve.model.checkpoint.names import layer_shapes
from ppserve.model.checkpoint.stored import DTYPES, Located, Placed, RawFile, StoredCheckpoint

MAGIC = 20240326
HEADER_BYTES = 256 * 4
STORED_DTYPES = {3: "float32", 5: "bfloat16"}
REFUSED = {
    1: "float32 with an unpadded vocabulary, which llm.c itself no longer reads",
    2: "bfloat16 with layer norms in float32 and an unpadded vocabulary, which llm.c itself no longer reads",
    4: "bfloat16 with layer norms in float32, which llm.c itself no longer reads",
}


class Header(msgspec.Struct, frozen=True):
    """The integers of the header that are used, in their order; V: real tokens, Vp: rows of the embedding."""

    magic: int
    version: int
    maxT: Positions
    V: Rows
    L: Layers
    NH: Width
    C: Width
    Vp: Rows


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
        why = REFUSED.get(version, "unknown")
        problem = f"is {version} ({why}); 3 (float32) and 5 (bfloat16) are served"
        raise CheckpointError(path, problem, field="version")
    return _architecture(path, checked(path, numbers, Header)), STORED_DTYPES[version]


def open_llmc(path: Path) -> StoredCheckpoint:
    """Open a .bin of version 3 (float32) or 5 (bfloat16). Raises CheckpointError."""
    arch, dtype = read_header(path)
    file = _lay_out(path, arch, dtype)
    located = {name: Located(file, name) for name in file.tensors}
    located["lm_head.weight"] = located["wte.weight"]
    return StoredCheckpoint(path, arch, located)


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


def _lay_out(path: Path, arch: Architecture, dtype: str) -> RawFile:
    """Every tensor's place, in closed form; the last one must end where the file ends."""
    width = arch.width
    order: dict[str, tuple[int, ...]] = {
        "wte.weight": (arch.padded_vocab_size, width),
        "wpe.weight": (arch.max_positions, width),
    }
    order |= {f"h.{i}.{name}": s for name, s in layer_shapes(arch).items() for i in range(arch.num_layers)}
    order |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    tensors, offset = {}, HEADER_BYTES
    for name, shape in order.items():
        tensors[name] = Placed(shape, dtype, offset, torch.empty(shape, device="meta").stride())
        offset += math.prod(shape) * DTYPES[dtype].itemsize
    size = file_size(path)
    if size != offset:
        raise CheckpointError(path, f"is {size} bytes long; its header asks for {offset}", field="size")
    return RawFile(path, tensors)
