"""Files that torch.save wrote: names, shapes and offsets of their tensors, without reading any of them.

Before the pickle inside is run its opcodes are checked: it may make nothing but tensors. Then
`torch.load(weights_only=True)` rebuilds it on the meta device, which knows where each tensor lies and reads
none of it (optimizer states cost nothing), and the bytes are read from the file when they are wanted.
"""

from __future__ import annotations

import pickletools
import re
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from ppserve.errors import CheckpointError
from ppserve.files import file_size, reason, shown
from ppserve.model.checkpoint.stored import Placed, RawFile, ScratchTensor

MAX_PICKLE_BYTES = 16 << 20
LEGACY_PICKLES = 5
"""The old format is five pickles (magic, version, system, objects, storage keys), then the raw storages."""

ALLOWED_GLOBAL = re.compile(
    r"collections (OrderedDict|Counter)"
    r"|torch\._utils _rebuild_(tensor|tensor_v2|tensor_v3|parameter)"
    r"|torch\.nn\.parameter Parameter"
    r"|torch(\.storage)? \w+Storage|torch (Size|device|float32|float16|bfloat16|float64|u?int\d+|bool)"
    r"|torch\.serialization _get_layout|_codecs encode"
)


def load_objects(path: Path) -> Any:
    """What torch.save was given, its tensors on the meta device (in memory, for a file of the old format).

    Raises CheckpointError for a file that is damaged or that asks for code to be run.
    """
    file_size(path)
    try:
        is_zip = zipfile.is_zipfile(path)
        if is_zip:
            with zipfile.ZipFile(path) as archive:
                _check_archive(path, archive)
        else:
            with path.open("rb") as stream:
                for _ in range(LEGACY_PICKLES):
                    _check_pickle(path, stream)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if is_zip:
                return torch.load(path, map_location="meta", weights_only=True, mmap=True)
            return torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything: its opcodes are a program
        raise CheckpointError(path, f"cannot be read as a file of torch.save ({reason(error)})") from error


class TorchFile(RawFile):
    """The tensors of one state dict inside a file that torch.save wrote. Implements `TensorFile`."""

    def __init__(self, path: Path, state: object, field: str | None = None) -> None:
        """state: a dict of tensors out of `load_objects(path)`; field: where in the file it was found."""
        size = file_size(path)
        if not isinstance(state, dict):
            raise CheckpointError(path, f"holds a {type(state).__name__}, not a dict of tensors", field=field)
        tensors: dict[str, Placed] = {}
        self._in_memory: dict[str, torch.Tensor] = {}
        for name, tensor in state.items():
            if not isinstance(name, str):
                raise CheckpointError(path, f"a tensor's name is {shown(name)}, not text", field=field)
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_quantized:
                raise CheckpointError(path, "is not a plain tensor", field=shown(name))
            if tensor.device.type == "meta":
                offset = _offset(path, size, name, tensor)
            else:
                self._in_memory[name] = tensor.detach()
                offset = tensor.data_ptr()
            dtype = str(tensor.dtype).removeprefix("torch.")
            tensors[name] = Placed(tuple(tensor.shape), dtype, offset, tuple(tensor.stride()))
        super().__init__(path, tensors)

    def rows(self, name: str, start: int, stop: int, scratch: ScratchTensor) -> torch.Tensor:
        if name in self._in_memory:
            return self._in_memory[name][start:stop]
        return super().rows(name, start, stop, scratch)


def _offset(path: Path, size: int, name: str, tensor: torch.Tensor) -> int:
    """Where a meta tensor lies in the file; its storage must lie inside, and it inside its storage."""
    storage = tensor.untyped_storage()
    begin = getattr(storage, "_checkpoint_offset", None)
    if not isinstance(begin, int):
        raise CheckpointError(path, "has no place in the file", field=shown(name))
    itemsize = tensor.element_size()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    first = begin + tensor.storage_offset() * itemsize
    end = first + (last + 1) * itemsize if tensor.numel() else first
    # A tensor must not claim more elements than it has bytes (stride 0), nor bytes beyond its file.
    if tensor.numel() * itemsize > storage.nbytes() or not 0 <= begin <= first <= end <= size:
        raise CheckpointError(path, "reaches beyond what is stored", field=shown(name))
    return int(first)


def _check_archive(path: Path, archive: zipfile.ZipFile) -> None:
    """A zip as torch.save writes it: nothing compressed, no name twice, one pickle, little-endian."""
    names: set[str] = set()
    pickles: list[zipfile.ZipInfo] = []
    for entry in archive.infolist():
        record = entry.filename.partition("/")[2]
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise CheckpointError(path, "is compressed, which torch.save never does", field=shown(entry.filename))
        if entry.filename in names:
            raise CheckpointError(path, "is in the archive twice", field=shown(entry.filename))
        names.add(entry.filename)
        if record == "data.pkl":
            pickles.append(entry)
        if record == "byteorder" and archive.read(entry) != b"little":
            raise CheckpointError(path, "is not little", field="byteorder")
        if record == ".storage_alignment" and archive.read(entry) != b"64":
            raise CheckpointError(path, "is not 64", field=".storage_alignment")
    if len(pickles) != 1:
        raise CheckpointError(path, f"has {len(pickles)} entries data.pkl, not one: not a file of torch.save")
    if pickles[0].file_size > MAX_PICKLE_BYTES:
        raise CheckpointError(path, f"is longer than {MAX_PICKLE_BYTES} bytes", field="data.pkl")
    with archive.open(pickles[0]) as stream:
        _check_pickle(path, stream)


def _check_pickle(path: Path, stream: IO[bytes]) -> None:
    """Walk a pickle without running it. Raises CheckpointError at the first thing that is not a tensor's."""
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name in {"STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4"}:
            raise CheckpointError(path, f"its pickle uses {opcode.name}, which torch.save never does: refused")
        if opcode.name == "GLOBAL" and not ALLOWED_GLOBAL.fullmatch(str(argument)):
            wanted = shown(str(argument).replace(" ", "."))
            raise CheckpointError(path, f"its pickle asks for {wanted}, which is no part of a checkpoint: refused")
