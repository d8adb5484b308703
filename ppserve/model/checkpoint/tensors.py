"""The tensors in checkpoint files under their canonical names; `FileCheckpoint` reads them when asked.

Files are mapped, not read: opening one costs no memory, and a stage's own tensors are copied one part at a time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from ppserve.core.architecture import Architecture
from ppserve.errors import CheckpointError
from ppserve.files import shown
from ppserve.model.checkpoint import WHOLE, TensorPart
from ppserve.model.checkpoint.names import LAYER_NAME, tensor_shapes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Sliceable(Protocol):
    """A mapped torch tensor, or what the safetensors reader gives in its place."""

    def __getitem__(self, index: Any, /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file. Its shape and dtype are known; its numbers are in the file."""

    path: Path
    name: str
    """In the file."""
    shape: tuple[int, ...]
    dtype: str
    """As the file names it, e.g. `float32` or `int8`."""
    open: Callable[[], Sliceable]
    """Maps the tensor. Raises CheckpointError."""
    is_transposed: bool = False
    """Whether the file holds (in, out) where a checkpoint has (out, in)."""

    @property
    def canonical_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.is_transposed else self.shape

    def read(self, part: TensorPart, dtype: torch.dtype) -> torch.Tensor:
        """A new contiguous tensor. Each range of rows is converted while it is copied."""
        stored = self.open()
        num_rows, *depth = self.canonical_shape
        rows = part.rows or (slice(0, num_rows),)
        columns = part.columns or slice(0, depth[0] if depth else 0)
        out_rows = sum(own.stop - own.start for own in rows)
        out = torch.empty((out_rows, columns.stop - columns.start) if depth else (out_rows,), dtype=dtype)
        begin = 0
        for own in rows:
            end = begin + own.stop - own.start
            if self.is_transposed:
                out[begin:end] = stored[columns, own].T
            else:
                out[begin:end] = stored[own, columns] if depth else stored[own]
            begin = end
        return out

    def has_bits_of(self, other: StoredTensor) -> bool:
        """Whether both hold the same bits in the same shape."""
        if (self.canonical_shape, self.dtype) != (other.canonical_shape, other.dtype):
            return False
        mine, theirs = (stored.open()[:].contiguous().view(torch.uint8) for stored in (self, other))
        return torch.equal(mine, theirs)


class FileCheckpoint:
    """A checkpoint whose tensors are all in files. Implements `Checkpoint`."""

    def __init__(self, path: Path, architecture: Architecture, tensors: Mapping[str, StoredTensor]) -> None:
        """tensors: by canonical name, of the right shape. Raises CheckpointError where one is missing."""
        self.path = path
        self.architecture = architecture
        self._converted_to: str | None = None
        self._tensors = tensors
        num_stored: Counter[str] = Counter()
        for name, shape in tensor_shapes(architecture).items():
            if name not in tensors:
                raise CheckpointError(path, "this tensor is missing", field=name)
            num_stored[tensors[name].dtype] += math.prod(shape)
        self.stored_dtype = num_stored.most_common(1)[0][0]

    def tensor(self, name: str, part: TensorPart = WHOLE) -> torch.Tensor:
        stored = self._tensors[name]
        return stored.read(part, DTYPES[self._converted_to or stored.dtype])

    def rounded_to(self, dtype: str) -> FileCheckpoint:
        """The same checkpoint as if it were stored in `dtype`."""
        rounded = copy(self)
        rounded._converted_to = rounded.stored_dtype = dtype
        return rounded


def by_canonical_name(
    stored: Iterable[StoredTensor],
    arch: Architecture,
    canonical: Callable[[str], str | None],
    is_in_out: bool = False,
) -> dict[str, StoredTensor]:
    """The tensors of a file under their canonical names, their shapes and dtypes checked.

    canonical: from a name in the file; None for what is no weight. is_in_out: the file holds the layers' linears
    as (in, out). Raises CheckpointError for a tensor that a GPT-2 of this architecture does not have.
    """
    expected = tensor_shapes(arch)
    found: dict[str, StoredTensor] = {}
    for tensor in stored:
        name = canonical(tensor.name)
        if name is None:
            continue
        if name not in expected:
            raise CheckpointError(tensor.path, _unexpected(name, arch), field=shown(tensor.name))
        if name in found:
            problem = f"is given twice: also as {found[name].name} in {found[name].path.name}"
            raise CheckpointError(tensor.path, problem, field=tensor.name)
        is_linear = name.startswith("h.") and len(expected[name]) == 2
        found[name] = replace(tensor, is_transposed=is_in_out and is_linear)
        _check(found[name], expected[name])
    return found


def _unexpected(name: str, arch: Architecture) -> str:
    match = LAYER_NAME.fullmatch(name)
    if match and int(match[1]) >= arch.num_layers:
        return f"belongs to a layer that the config, with {arch.num_layers}, does not have"
    if "cross" in name or "q_attn" in name:
        return "belongs to cross attention, which is not served"
    return "is no tensor of a GPT-2 with this configuration"


def _check(tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype not in DTYPES:
        problem = f"is stored as {shown(tensor.dtype)}, not as {', '.join(DTYPES)}"
    elif tensor.canonical_shape != shape:
        expected = shape[::-1] if tensor.is_transposed else shape
        problem = f"has the shape {shown(tensor.shape)}; the architecture asks for {expected}"
    else:
        return
    raise CheckpointError(tensor.path, problem, field=tensor.name)
