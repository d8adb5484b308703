"""llm.c's `gpt2_124M.bin`: a header of 256 integers, then every tensor, each stacked over the layers.

Offsets follow from the header alone, so the file's size is checked first and then only the rows asked for
are read. Linears are (out, in), the head is tied, GELU is the tanh form, layer norm's epsilon is 1e-5.
(Layout: karpathy/llm.c, train_gpt2.py, write_model.)
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

from ppserve.core.architecture import Architecture
from ppserve.errors import CheckpointError
from ppserve.model.checkpoint.fields import LIMITS, Fields, check_heads, ending_id
from ppserve.model.checkpoint.files import file_size
from ppserve.model.checkpoint.names import block_shapes
from ppserve.model.checkpoint.stored import DTYPES, Located, RawFile, Stored, StoredCheckpoint, Strided, contiguous

MAGIC = 20240326
HEADER_BYTES = 256 * 4
STORED_DTYPES = {3: "float32", 5: "bfloat16"}
REFUSED = {
    1: "float32 with an unpadded vocabulary, which llm.c itself no longer reads",
    2: "bfloat16 with layer norms in float32 and an unpadded vocabulary, which llm.c itself no longer reads",
    4: "bfloat16 with layer norms in float32, which llm.c itself no longer reads",
}

STACKED = (
    "ln_1.weight",
    "ln_1.bias",
    "attn.c_attn.weight",
    "attn.c_attn.bias",
    "attn.c_proj.weight",
    "attn.c_proj.bias",
    "ln_2.weight",
    "ln_2.bias",
    "mlp.c_fc.weight",
    "mlp.c_fc.bias",
    "mlp.c_proj.weight",
    "mlp.c_proj.bias",
)
"""The layers' tensors in the order of the file, between the embeddings and the final norm."""


def read_header(path: Path) -> tuple[Architecture, str]:
    """The architecture and the stored dtype. Raises CheckpointError naming the header's field."""
    file_size(path)
    try:
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read ({error.strerror})") from error
    if len(header) < HEADER_BYTES:
        raise CheckpointError(path, f"is shorter than the header's {HEADER_BYTES} bytes", field="header")
    names = ("magic", "version", "maxT", "V", "L", "NH", "C", "Vp")
    fields = Fields(path, dict(zip(names, struct.unpack("<8i", header[:32]), strict=True)))
    if fields.values["magic"] != MAGIC:
        raise fields.error("magic", f"is {fields.values['magic']}, not {MAGIC}: not a GPT-2 of llm.c")
    return _architecture(fields), _stored_dtype(fields)


def open_llmc(path: Path) -> StoredCheckpoint:
    """Open a .bin of version 3 (float32) or 5 (bfloat16). Raises CheckpointError."""
    arch, dtype = read_header(path)
    file = _lay_out(path, arch, dtype)
    located = {name: Located(file, name) for name in file.tensors}
    located["lm_head.weight"] = located["wte.weight"]
    return StoredCheckpoint(path, arch, located)


def _stored_dtype(fields: Fields) -> str:
    version = fields.values["version"]
    if version not in STORED_DTYPES:
        why = REFUSED.get(version, "unknown")
        raise fields.error("version", f"is {version} ({why}); 3 (float32) and 5 (bfloat16) are served")
    return STORED_DTYPES[version]


def _architecture(fields: Fields) -> Architecture:
    width = fields.integer("C", limit=LIMITS["width"])
    vocab_size = fields.integer("V", limit=LIMITS["vocabulary"])
    end_of_text = 50256
    arch = Architecture(
        num_layers=fields.integer("L", limit=LIMITS["layers"]),
        width=width,
        num_heads=fields.integer("NH", limit=width),
        max_positions=fields.integer("maxT", limit=LIMITS["positions"]),
        vocab_size=vocab_size,
        padded_vocab_size=fields.integer("Vp", limit=LIMITS["vocabulary"], least=vocab_size),
        inner_width=4 * width,
        activation="gelu_new",
        eos_id=ending_id(end_of_text, vocab_size),
        bos_id=ending_id(end_of_text, vocab_size),
    )
    check_heads(arch, fields, "NH")
    return arch


def _lay_out(path: Path, arch: Architecture, dtype: str) -> RawFile:
    """Every tensor's place, in closed form; the last one must end where the file ends."""
    width, itemsize = arch.width, DTYPES[dtype].itemsize
    shapes = block_shapes(arch)
    order: list[tuple[str, tuple[int, ...]]] = [
        ("wte.weight", (arch.padded_vocab_size, width)),
        ("wpe.weight", (arch.max_positions, width)),
    ]
    order += [(f"h.{i}.{name}", shapes[name]) for name in STACKED for i in range(arch.num_layers)]
    order += [("ln_f.weight", (width,)), ("ln_f.bias", (width,))]
    tensors, layouts, offset = {}, {}, HEADER_BYTES
    for name, shape in order:
        tensors[name], layouts[name] = Stored(shape, dtype), Strided(offset, contiguous(shape))
        offset += math.prod(shape) * itemsize
    size = file_size(path)
    if size != offset:
        raise CheckpointError(path, f"is {size} bytes long; its header asks for {offset}", field="size")
    return RawFile(path, tensors, layouts)
