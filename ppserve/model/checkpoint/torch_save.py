"""Files that torch.save wrote, mapped into memory: an optimizer state beside the weights costs nothing."""

from __future__ import annotations

import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from ppserve.errors import CheckpointError
from ppserve.files import file_size, reason, shown
from ppserve.model.checkpoint.tensors import StoredTensor


def load_objects(path: Path) -> Any:
    """What torch.save was given. Tensors are mapped; those of the old format, which is no zip, are in memory.

    Raises CheckpointError for a file that is damaged or that holds more than tensors and plain values.
    """
    file_size(path)
    try:
        is_zip = zipfile.is_zipfile(path)
        if is_zip:
            _check_archive(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything: it is a program
        raise CheckpointError(path, f"cannot be read as a file of torch.save ({_cause(error)})") from error


def stored_tensors(path: Path, state: object, field: str | None = None) -> list[StoredTensor]:
    """The tensors of a state dict. field: where in the file it was found. Raises CheckpointError."""
    if not isinstance(state, dict):
        raise CheckpointError(path, f"holds a {type(state).__name__}, not a dict of tensors", field=field)
    return [_stored(path, name, tensor, field) for name, tensor in state.items()]


def _stored(path: Path, name: object, tensor: object, field: str | None) -> StoredTensor:
    if not isinstance(name, str):
        raise CheckpointError(path, f"a tensor's name is {shown(name)}, not text", field=field)
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise CheckpointError(path, "is not a plain tensor", field=shown(name))
    # A stride of 0 lets one number stand for any number of them.
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise CheckpointError(path, "reaches beyond what is stored", field=shown(name))
    dtype = str(tensor.dtype).removeprefix("torch.")
    return StoredTensor(path, name, tuple(tensor.shape), dtype, tensor)


def _check_archive(path: Path) -> None:
    """Raises CheckpointError for a compressed entry, whose bytes torch would map as numbers."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise CheckpointError(path, "is compressed, which torch.save never does", shown(entry.filename))


def _cause(error: Exception) -> str:
    """One line of torch's explanation, which otherwise tells how to load the file carelessly."""
    match = re.search(r"(?:WeightsUnpickler error:|Trying to load) (.+)", str(error))
    return shown(match[1], 120) if match else reason(error)
