"""A Hugging Face directory: config.json, and safetensors or torch files, perhaps with an index."""

from __future__ import annotations

from os.path import lexists
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ppserve.errors import CheckpointError
from ppserve.files import file_size, misread
from ppserve.model.checkpoint.config_json import read_config
from ppserve.model.checkpoint.families import FAMILIES
from ppserve.model.checkpoint.hub import weight_files
from ppserve.model.checkpoint.tensors import FileCheckpoint, StoredTensor
from ppserve.model.checkpoint.torch_save import read_state_dict

SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def open_directory(directory: Path) -> FileCheckpoint:
    """Open config.json and the weights beside it. Raises CheckpointError."""
    arch = read_config(directory)
    path, *parts = weight_files(directory)
    if missing := [part.name for part in parts if not lexists(part)]:
        raise CheckpointError(path, f"names files that are missing: {', '.join(missing)}", "weight_map")
    stored = [tensor for file in parts or [path] for tensor in _stored_tensors(file)]
    family = FAMILIES[arch.family]
    return FileCheckpoint(path, arch, stored, family.hugging_face_name, family.is_in_out)


def _stored_tensors(path: Path) -> list[StoredTensor]:
    """Return the tensors of one file. Raises CheckpointError."""
    if path.suffix != ".safetensors":
        return read_state_dict(path)
    file_size(path)
    stored = []
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                tensor = file.get_slice(name)
                dtype = str(tensor.get_dtype())
                dtype = SAFETENSORS_DTYPES.get(dtype, dtype)
                stored.append(StoredTensor(path, name, tuple(tensor.get_shape()), dtype, tensor))
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise misread(path, "a safetensors file", error) from error
    return stored
