"""The tensors in checkpoint files, by their canonical names. `FileCheckpoint` reads them when it is asked for
them.

Files are mapped, not read, so opening one takes no memory. A stage copies its tensors a part at a time.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from ppserve.core.architecture import Architecture
from ppserve.errors import CheckpointError
from ppserve.files import file_size, shown
from ppserve.model.checkpoint import WHOLE, Checkpoint, FourBits, TensorPart
from ppserve.model.checkpoint.families import tensor_shapes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


StoredRows = slice | torch.Tensor
"""Some rows of a tensor in a file: a range, or the indices of rows."""


class Numbers(Protocol):
    """The numbers of a tensor, which are mapped: a torch tensor, or an object that reads them when it is
    sliced."""

    def __getitem__(self, part: StoredRows | tuple[StoredRows, slice], /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file. Its shape and dtype are known; its numbers are in the file."""

    path: Path
    name: str
    """The tensor's name in the file."""
    shape: tuple[int, ...]
    dtype: str
    """The type of the numbers, as `float32` or `int8`."""
    numbers: Numbers
    is_transposed: bool = False
    """Whether the file holds (in, out) where a checkpoint has (out, in)."""
    four_bits: Callable[[StoredRows], FourBits] | None = None
    """Reads rows as they are stored; None: they are not stored in 4 bits."""

    @property
    def canonical_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.is_transposed else self.shape

    def read(self, part: TensorPart, dtype: torch.dtype) -> torch.Tensor:
        """Read this part into a new contiguous tensor."""
        rows, columns = part.rows or (slice(None),), part.columns or slice(None)
        if len(self.shape) == 1:
            parts = [self.numbers[own] for own in rows]
        elif self.is_transposed:
            parts = [self.numbers[columns, own].T for own in rows]
        else:
            parts = [self.numbers[own, columns] for own in rows]
        return torch.cat([part.to(dtype) for part in parts])

    def has_bits_of(self, other: StoredTensor) -> bool:
        """Return whether both tensors have the same bits in the same shape."""
        if (self.canonical_shape, self.dtype) != (other.canonical_shape, other.dtype):
            return False
        mine, theirs = (stored.numbers[:].contiguous().view(torch.uint8) for stored in (self, other))
        return torch.equal(mine, theirs)


class FileCheckpoint:
    """A `Checkpoint` whose tensors are all in files."""

    def __init__(
        self,
        path: Path,
        arch: Architecture,
        stored: Iterable[StoredTensor],
        canonical: Callable[[str], str | None] = str,
        is_in_out: bool = False,
    ) -> None:
        """Raise CheckpointError if a tensor is missing, unknown, or of another shape or type than it must be.

        canonical: returns the canonical name for a name in the file; None: it is no weight. is_in_out: the file
        has the layers' linear weights as (in, out).
        """
        self.path = path
        self._converted_to: str | None = None
        tensors = _by_canonical_name(stored, arch, canonical, is_in_out)
        self._sizes = {tensor.path: file_size(tensor.path) for tensor in tensors.values()}
        self.architecture, self._tensors = _settle_head(arch, tensors)
        num_stored: Counter[str] = Counter()
        for name, shape in tensor_shapes(arch).items():
            if name not in self._tensors:
                raise CheckpointError(path, "this tensor is missing", field=name)
            num_stored[self._tensors[name].dtype] += math.prod(shape)
        self.stored_dtype = num_stored.most_common(1)[0][0]
        self.stored_quantization = "int4" if self._has_mostly_four_bits() else "none"

    def tensor(self, name: str, part: TensorPart = WHOLE) -> torch.Tensor:
        stored = self._stored(name)
        return stored.read(part, DTYPES[self._converted_to or stored.dtype])

    def four_bits(self, name: str, rows: tuple[slice, ...]) -> FourBits | None:
        read = self._stored(name).four_bits
        if read is None:
            return None
        return FourBits(*map(torch.cat, zip(*map(read, rows), strict=True)))

    def _has_mostly_four_bits(self) -> bool:
        """Return whether most of the weights are stored in 4 bits."""
        sizes = [(tensor.four_bits is not None, math.prod(tensor.shape)) for tensor in self._tensors.values()]
        return 2 * sum(size for is_in_four, size in sizes if is_in_four) > sum(size for _, size in sizes)

    def _stored(self, name: str) -> StoredTensor:
        stored = self._tensors[name]
        # Reading a mapped part that is gone ends the process.
        if file_size(stored.path) != self._sizes[stored.path]:
            raise CheckpointError(stored.path, "has another size than when it was opened", field=stored.name)
        return stored

    def rounded_to(self, dtype: str) -> FileCheckpoint:
        """Return a view of this checkpoint that reads its tensors as if they were stored in `dtype`."""
        rounded = copy(self)
        rounded._converted_to = rounded.stored_dtype = dtype
        return rounded


def _settle_head(
    arch: Architecture, tensors: dict[str, StoredTensor]
) -> tuple[Architecture, dict[str, StoredTensor]]:
    """Decide which matrix is the LM head, as transformers does. Return the architecture and the tensors.

    If the config says that it is not tied, it is the stored one. If it is tied, it is the embedding, or the head
    where only that is stored. If both are stored and differ, the config is wrong, and both are used.
    """
    embedding, head = tensors.get("wte.weight"), tensors.get("lm_head.weight")
    one = embedding or head
    if not arch.tied_embeddings or one is None:
        return arch, tensors
    if embedding and head and not embedding.has_bits_of(head):
        return replace(arch, tied_embeddings=False), tensors
    return arch, tensors | {"wte.weight": one, "lm_head.weight": one}


def _by_canonical_name(
    stored: Iterable[StoredTensor], arch: Architecture, canonical: Callable[[str], str | None], is_in_out: bool
) -> dict[str, StoredTensor]:
    """Return the tensors of a file by their canonical names, with checked shapes and dtypes. Raises
    CheckpointError."""
    expected = tensor_shapes(arch)
    found: dict[str, StoredTensor] = {}
    for tensor in stored:
        name = canonical(tensor.name)
        if name is None:
            continue
        if name not in expected:
            problem = f"is no tensor of a {arch.family} with {arch.num_layers} layers and this configuration"
            raise CheckpointError(tensor.path, problem, field=shown(tensor.name))
        if name in found:
            problem = f"is given twice: also as {found[name].name} in {found[name].path.name}"
            raise CheckpointError(tensor.path, problem, field=tensor.name)
        is_linear = name.startswith("h.") and len(expected[name]) == 2
        found[name] = replace(tensor, is_transposed=is_in_out and is_linear)
        _check(found[name], expected[name])
    return found


def _check(tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype not in DTYPES:
        problem = f"is stored as {shown(tensor.dtype)}, not as {', '.join(DTYPES)}"
    elif tensor.canonical_shape != shape:
        expected = shape[::-1] if tensor.is_transposed else shape
        problem = f"has the shape {shown(tensor.shape)}; the architecture asks for {expected}"
    else:
        return
    raise CheckpointError(tensor.path, problem, field=tensor.name)


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return a digest by which ranks see whether they opened the same weights, in whatever format. Raises
    CheckpointError.

    It covers three squares of each matrix, and every vector whole. Weights that were trained further differ there,
    even if only queries or values were. A few changed numbers may go unnoticed.
    """
    digest = hashlib.sha256()
    for name, shape in tensor_shapes(checkpoint.architecture).items():
        sample = checkpoint.tensor(name, _squares(shape) if len(shape) > 1 else WHOLE)
        digest.update(f"{name} {shape} {sample.dtype}".encode())
        digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _squares(shape: tuple[int, ...]) -> TensorPart:
    """Choose a square in the middle of each third of the rows, because the thirds may be queries, keys and
    values."""
    rows, columns = shape
    thirds = tuple(_around(rows * sixths // 6, rows) for sixths in (1, 3, 5))
    return TensorPart(thirds, _around(columns // 2, columns))


def _around(middle: int, size: int) -> slice:
    return slice(max(0, middle - 4), min(size, middle + 4))
