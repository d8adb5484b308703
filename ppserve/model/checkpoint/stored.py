"""Where tensors are stored: in which file, under which name, in which layout; and a checkpoint made of such.

A tensor is read in pieces of two megabytes into memory of its own, so that loading a stage costs its own
weights and one piece, whatever the format: a mapping of the file would count every page that was touched.
"""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from ppserve.core.architecture import Architecture
from ppserve.errors import CheckpointError
from ppserve.files import reason, shown
from ppserve.model.checkpoint import WHOLE, Part
from ppserve.model.checkpoint.names import LAYER_NAME, tensor_shapes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PIECE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """What a file says of one of its tensors. dtype: as the file names it, e.g. `float32` or `int8`."""

    shape: tuple[int, ...]
    dtype: str


class TensorFile(Protocol):
    """A file of named tensors of which only the headers have been read."""

    path: Path

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """By the names that the file gives them."""
        ...

    def is_one(self, name: str, other: str) -> bool:
        """Whether two names are known to be one tensor, stored once."""
        ...

    def rows(self, name: str, start: int, stop: int, scratch: ScratchTensor) -> torch.Tensor:
        """Rows start..stop of a tensor of one or two dimensions, valid until `scratch` is used again.

        Raises CheckpointError.
        """
        ...


@dataclass(frozen=True, slots=True)
class Located:
    """One tensor in one file. transposed: the file holds (in, out) where we want (out, in)."""

    file: TensorFile
    name: str
    transposed: bool = False

    @property
    def stored(self) -> Stored:
        return self.file.tensors[self.name]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape after `transposed` has been undone."""
        return self.stored.shape[::-1] if self.transposed else self.stored.shape

    def pieces(self, rows: slice | None = None) -> list[tuple[int, int]]:
        """The row ranges in which the tensor, or these of its stored rows, are read."""
        num_rows, *rest = self.stored.shape
        row_bytes = math.prod(rest) * DTYPES[self.stored.dtype].itemsize
        step = max(1, PIECE_BYTES // row_bytes)
        rows = rows or slice(0, num_rows)
        return [(start, min(start + step, rows.stop)) for start in range(rows.start, rows.stop, step)]

    def read(self, dtype: str, part: Part, pieces: ScratchTensor, turned: ScratchTensor) -> torch.Tensor:
        """A new tensor that shares nothing with the file. Pieces are read and transposed in the scratches."""
        outputs = part.rows or (slice(0, self.shape[0]),)
        inputs = part.columns or slice(0, self.shape[-1])
        depth = self.shape[1:] and (inputs.stop - inputs.start,)
        out = _memory((sum(rows.stop - rows.start for rows in outputs), *depth), DTYPES[dtype])
        if self.transposed:
            self._read_turned(out, outputs, inputs, (pieces, turned))
            return out
        at = 0
        for rows in outputs:
            for start, stop in self.pieces(rows):
                piece = self.file.rows(self.name, start, stop, pieces)
                out[at : at + stop - start] = piece[:, inputs] if depth else piece
                at += stop - start
        return out

    def _read_turned(
        self, out: torch.Tensor, outputs: Iterable[slice], inputs: slice, scratches: tuple[ScratchTensor, ...]
    ) -> None:
        """Outputs are columns in the file, inputs are rows."""
        pieces, turned = scratches
        for start, stop in self.pieces(inputs):
            piece = self.file.rows(self.name, start, stop, pieces)
            at = 0
            for rows in outputs:  # in the scratch: twice as fast as into the larger tensor
                own = piece[:, rows].T
                where = slice(start - inputs.start, stop - inputs.start)
                out[at : at + len(own), where] = turned.take(own.shape, own.dtype).copy_(own)
                at += len(own)

    def equals(self, other: Located) -> bool:
        """Whether two tensors hold the same bits; reads both, piece by piece, up to the first difference."""
        mine, theirs = ((of.stored.shape, of.stored.dtype, of.transposed) for of in (self, other))
        if mine != theirs:
            return False
        if self.file is other.file and self.file.is_one(self.name, other.name):
            return True
        scratch, more = ScratchTensor(), ScratchTensor()
        return all(torch.equal(self._bits(rows, scratch), other._bits(rows, more)) for rows in self.pieces())

    def _bits(self, rows: tuple[int, int], scratch: ScratchTensor) -> torch.Tensor:
        return self.file.rows(self.name, *rows, scratch).contiguous().view(torch.uint8)


def _memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor whose memory goes back to the system as soon as the tensor is released.

    Tensors are packed and released one by one; the allocator would keep a quarter of the weights' size of such
    memory, measured. Small tensors come from the allocator all the same.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < PIECE_BYTES // 4:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(tuple(shape))


class ScratchTensor:
    """Memory for one piece, used again and again: fresh pages cost more than what is read into them."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor, valid until the next call."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._bytes.numel() < num_bytes:
            self._bytes = _memory((num_bytes,), torch.uint8)
        return self._bytes[:num_bytes].view(dtype).view(tuple(shape))


class StoredCheckpoint:
    """A checkpoint of which every tensor was found. Implements `Checkpoint`."""

    def __init__(self, path: Path, architecture: Architecture, located: Mapping[str, Located]) -> None:
        """located: canonical name to place, of the right shape. Raises CheckpointError where one is missing."""
        self.path = path
        self.architecture = architecture
        self._pieces, self._turned = ScratchTensor(), ScratchTensor()
        self._rounded_to: str | None = None
        self._located = located
        dtypes: Counter[str] = Counter()
        for name, shape in tensor_shapes(architecture).items():
            if name not in located:
                raise CheckpointError(path, "this tensor is missing", field=name)
            dtypes[located[name].stored.dtype] += math.prod(shape)
        self.stored_dtype = dtypes.most_common(1)[0][0]

    def tensor(self, name: str, part: Part = WHOLE) -> torch.Tensor:
        """One tensor, or a part of it, on the CPU, in memory of its own."""
        place = self._located[name]
        return place.read(self._rounded_to or place.stored.dtype, part, self._pieces, self._turned)

    def rounded_to(self, dtype: str) -> StoredCheckpoint:
        """The same checkpoint as if it were stored in `dtype`: rounded piece by piece while it is read.

        Reading first and rounding then would have a matrix twice in memory, once in the larger dtype.
        """
        rounded = copy(self)
        rounded._rounded_to = rounded.stored_dtype = dtype
        return rounded


def locate(
    files: Iterable[TensorFile], arch: Architecture, canonical: Callable[[str], str | None], in_out: bool = False
) -> dict[str, Located]:
    """Canonical names to places. Raises CheckpointError for a tensor that a GPT-2 does not have, or not so.

    canonical: from the name that a file gives a tensor; None for what is passed over. in_out: the files hold the
    layers' linears as (in, out).
    """
    expected = tensor_shapes(arch)
    located: dict[str, Located] = {}
    for file in files:
        for stored_name in file.tensors:
            name = canonical(stored_name)
            if name is None:
                continue
            if name not in expected:
                raise CheckpointError(file.path, _unexpected(name, arch), field=shown(stored_name))
            if name in located:
                problem = f"is given twice: also as {located[name].name} in {located[name].file.path.name}"
                raise CheckpointError(file.path, problem, field=stored_name)
            is_linear = name.startswith("h.") and len(expected[name]) == 2
            located[name] = Located(file, stored_name, transposed=in_out and is_linear)
            _check(located[name], expected[name])
    return located


def _unexpected(name: str, arch: Architecture) -> str:
    match = LAYER_NAME.fullmatch(name)
    if match and int(match[1]) >= arch.num_layers:
        return f"belongs to a layer that the config, with {arch.num_layers}, does not have"
    if "cross" in name or "q_attn" in name:
        return "belongs to cross attention, which is not served"
    return "is no tensor of a GPT-2 with this configuration"


def _check(place: Located, shape: tuple[int, ...]) -> None:
    stored = place.stored
    if stored.dtype not in DTYPES:
        problem = f"is stored as {shown(stored.dtype)}, not as {', '.join(DTYPES)}"
    elif place.shape != shape:
        expected = shape[::-1] if place.transposed else shape
        problem = f"has the shape {shown(stored.shape)}; the architecture asks for {expected}"
    else:
        return
    raise CheckpointError(place.file.path, problem, field=place.name)


@dataclass(frozen=True, slots=True)
class Placed(Stored):
    """A tensor of a raw file. offset: bytes (of memory, if the file was read whole); stride: elements."""

    offset: int
    stride: tuple[int, ...]


class RawFile:
    """Tensors at known offsets of an uncompressed little-endian file. Implements `TensorFile`."""

    def __init__(self, path: Path, tensors: Mapping[str, Placed]) -> None:
        """The caller has checked that every tensor lies inside the file."""
        self.path = path
        self.tensors = tensors

    def is_one(self, name: str, other: str) -> bool:
        return self.tensors[name] == self.tensors[other]

    def rows(self, name: str, start: int, stop: int, scratch: ScratchTensor) -> torch.Tensor:
        placed = self.tensors[name]
        dtype = DTYPES[placed.dtype]
        shape = (stop - start, *placed.shape[1:])
        num_elements = 1 + sum((n - 1) * s for n, s in zip(shape, placed.stride, strict=True))
        buffer = scratch.take((num_elements,), dtype)
        begin = placed.offset + start * placed.stride[0] * dtype.itemsize
        self._read_into(buffer.view(torch.uint8).numpy().data, begin)
        return buffer.as_strided(shape, placed.stride)

    def _read_into(self, memory: memoryview, begin: int) -> None:
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(begin)
                done = 0
                while done < len(memory):
                    count = file.readinto(memory[done:])
                    if not count:
                        raise CheckpointError(self.path, "ended early: it was truncated while it was being read")
                    done += count
        except OSError as error:
            raise CheckpointError(self.path, f"cannot be read ({reason(error)})") from error
