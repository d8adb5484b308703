"""Reads the header of a GGUF file: its values by key, and where its tensors are.

Every length is compared with the rest of the file before it is used, because a damaged file may have any. (The
reader of the `gguf` package loops over such counts.) Layout: ggml-org/ggml, docs/gguf.md, versions 2 and 3, little
endian. A model may be split into several files, which are named as by llama.cpp's gguf-split.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

from ppserve.errors import CheckpointError
from ppserve.files import bytes_shown, file_size, misread, read_start, shown

MAGIC = b"GGUF"
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of `struct`, by the type number of a value."""
TEXT, ARRAY = 8, 9
MAX_BYTES = 64 << 20  # the greatest size of a header, more than that of any in use
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""The file name of a part of a model. The first part has number 1."""


class TensorInfo(NamedTuple):
    """A tensor that the header lists."""

    name: str
    shape: tuple[int, ...]
    """The sizes in torch's order: the numbers of the last dimension are next to each other in memory."""
    type: int
    """The type's number in `gguf.GGMLQuantizationType`."""
    offset: int
    """Where the tensor's numbers begin, in bytes from the beginning of the file."""


class GGUFHeader(NamedTuple):
    """The header of one file."""

    values: dict[str, Any]
    tensors: list[TensorInfo]


def is_gguf(path: Path) -> bool:
    """Return whether a file begins as a GGUF file does. Its name does not matter."""
    return path.is_file() and read_start(path, 4) == MAGIC


def read_header(path: Path) -> GGUFHeader:
    """Read the header of one file. Raises CheckpointError if it is no header, or not a whole one."""
    size = min(file_size(path), MAX_BYTES)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as content:
            return _header(_Cursor(content))
    except (OSError, ValueError, struct.error) as error:
        raise misread(path, "a GGUF file", error) from error


def read_parts(path: Path) -> dict[Path, GGUFHeader]:
    """Read the headers of all files of a model, in order. The first one has the values. path: any of the files.
    Raises CheckpointError if a part is missing, or belongs to another model."""
    header = read_header(path)
    number, count, num_tensors = place = _place_of(path, header)
    if count == 1:
        return {path: header}
    name = PART.fullmatch(path.name)
    if name is None or (int(name[2]), int(name[3])) != (number + 1, count):
        ending = f"-{number + 1:05}-of-{count:05}.gguf"
        problem = f"is part {number + 1} of {count}; the other parts are found only if its name ends with {ending}"
        raise CheckpointError(path, problem, field="split.no")
    found: dict[Path, GGUFHeader] = {}
    for at in range(count):
        part = path.with_name(f"{name[1]}-{at + 1:05}-of-{count:05}.gguf")
        if not part.exists():
            raise CheckpointError(part, f"is missing: {path.name} is one of {count} parts of a model")
        found[part] = header if part == path else read_header(part)
        if _place_of(part, found[part]) != (at, *place[1:]):
            raise CheckpointError(part, f"is not part {at + 1} of the model of {path.name}", field="split.no")
    num_found = sum(len(each.tensors) for each in found.values())
    if num_tensors not in (None, num_found):
        problem = f"is {num_tensors}, but the {count} parts have {num_found} tensors"
        raise CheckpointError(path, problem, field="split.tensors.count")
    return found


def _place_of(path: Path, header: GGUFHeader) -> tuple[int, int, Any]:
    """Return a part's number, from 0; the number of parts; and the number of tensors in all parts together. Raises
    CheckpointError if the header's numbers cannot be right."""
    number, count = header.values.get("split.no", 0), header.values.get("split.count", 0) or 1
    if not isinstance(number, int) or not isinstance(count, int) or not 0 <= number < count:
        problem = f"is {shown(number)} of {shown(count)} parts, which cannot be"
        raise CheckpointError(path, problem, field="split.no")
    return number, count, header.values.get("split.tensors.count")


class _Cursor:
    """A position in a file, which every read moves. Reads raise ValueError where the file ends."""

    def __init__(self, content: mmap.mmap) -> None:
        self.at = 0
        self._content = content

    def bytes(self, count: int) -> bytes:
        if count > len(self._content) - self.at:
            raise ValueError(f"its header ends too early, or passes 64 MiB, after byte {self.at}")
        self.at += count
        return self._content[self.at - count : self.at]

    def numbers(self, form: str, count: int = 1) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{form}", self.bytes(count * struct.calcsize(form)))

    def text(self) -> str:
        return self.bytes(*self.numbers("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind != ARRAY:
            return self.values(kind, 1)[0]
        return self.values(*self.numbers("I"), *self.numbers("Q"))

    def values(self, kind: int, count: int) -> list[Any]:
        if kind == TEXT:
            return [self.text() for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f"{kind} is not the type of a value")
        return list(self.numbers(SCALARS[kind], count))


def _header(cursor: _Cursor) -> GGUFHeader:
    if cursor.bytes(4) != MAGIC:
        raise ValueError(f"such files begin with {bytes_shown(MAGIC)}")
    (version,), (num_tensors, num_values) = cursor.numbers("I"), cursor.numbers("Q", 2)
    if version in (2 << 24, 3 << 24):
        raise ValueError("its numbers are big endian; gguf-py's gguf-convert-endian converts them")
    if version not in (2, 3):
        raise ValueError(f"its version is {version}; only 2 and 3 are served")
    values: dict[str, Any] = {}
    for _ in range(num_values):
        key, (kind,) = cursor.text(), cursor.numbers("I")
        values[key] = cursor.value(kind)
    tensors = [_tensor(cursor) for _ in range(num_tensors)]
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        raise ValueError(f"its alignment is {alignment}")
    begin = math.ceil(cursor.at / alignment) * alignment
    return GGUFHeader(values, [tensor._replace(offset=begin + tensor.offset) for tensor in tensors])


def _tensor(cursor: _Cursor) -> TensorInfo:
    """Read one tensor's entry. Its offset counts from where the tensors begin."""
    name, (num_dimensions,) = cursor.text(), cursor.numbers("I")
    sizes = cursor.numbers("Q", num_dimensions)
    (kind,), (offset,) = cursor.numbers("I"), cursor.numbers("Q")
    return TensorInfo(name, sizes[::-1], kind, offset)
