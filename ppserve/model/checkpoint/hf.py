"""A Hugging Face directory: config.json beside safetensors or torch files, whole or split by an index.

Linears of this format are Conv1D, stored (in, out). safetensors are read by the slices of the official reader.
"""

from __future__ import annotations

import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ppserve.errors import CheckpointError
from ppserve.files import file_size, is_file, reason, shown
from ppserve.model.checkpoint.config_json import read_config
from ppserve.model.checkpoint.hub import WEIGHT_FILES, read_index
from ppserve.model.checkpoint.names import LAYER_NAME
from ppserve.model.checkpoint.tensors import FileCheckpoint, StoredTensor
from ppserve.model.checkpoint.torch_save import load_objects, stored_tensors

SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

MASK_BUFFER = re.compile(r"attn\.(bias|masked_bias)")
TASK_HEAD = re.compile(r"(score|classifier|qa_outputs|multiple_choice_head|v_head)\..+")


def open_directory(directory: Path) -> FileCheckpoint:
    """Open config.json and the weights beside it. Raises CheckpointError."""
    arch = read_config(directory)
    name = next((name for name in WEIGHT_FILES if is_file(directory / name)), None)
    if name is None:
        raise CheckpointError(directory, f"holds none of {', '.join(WEIGHT_FILES)}")
    path = directory / name
    stored = _indexed_tensors(path) if name.endswith(".json") else _stored_tensors(path)
    return FileCheckpoint(path, arch, stored, _canonical, is_in_out=True)


def _stored_tensors(path: Path) -> list[StoredTensor]:
    if path.suffix == ".safetensors":
        return _safetensors(path)
    return stored_tensors(path, load_objects(path))


def _safetensors(path: Path) -> list[StoredTensor]:
    """The tensors that the header of a .safetensors file lists. Raises CheckpointError."""
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
        raise CheckpointError(path, f"is not a safetensors file ({reason(error)})") from error
    return stored


def _indexed_tensors(index: Path) -> list[StoredTensor]:
    """The tensors of the files that an index names; what it says of each tensor must be true."""
    suffix = ".safetensors" if index.name.startswith("model.safetensors") else ".bin"
    stored: list[StoredTensor] = []
    names_in: dict[str, set[str]] = {}
    for tensor, file in read_index(index).items():
        if file not in names_in:
            own = _stored_tensors(_beside(index, file, suffix, tensor))
            names_in[file] = {stored.name for stored in own}
            stored += own
        if tensor not in names_in[file]:
            problem = f"lacks this tensor, which {index.name} places in it"
            raise CheckpointError(index.parent / file, problem, field=shown(tensor))
    return stored


def _beside(index: Path, name: str, suffix: str, tensor: str) -> Path:
    """The file of an index entry: a plain name, and no way out of the directory.

    A link is followed within the directory, and from a snapshot of the hub's cache to that model's blobs.
    """
    if not re.fullmatch(r"[\w][\w.+-]{0,254}", name) or not name.endswith(suffix):
        raise CheckpointError(index, f"{shown(name)} is not the plain name of a {suffix} file", shown(tensor))
    path = index.parent / name
    try:
        target = path.resolve(strict=True)
        home = index.parent.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(path, f"is named by {index.name} but cannot be opened", shown(tensor)) from error
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if not (target.is_relative_to(home) or target.is_relative_to(blobs)):
        raise CheckpointError(path, f"leads out of the directory, to {shown(str(target))}", shown(tensor))
    return path


def _canonical(stored_name: str) -> str | None:
    name = stored_name.removeprefix("transformer.")
    match = LAYER_NAME.fullmatch(name)
    is_ignored = MASK_BUFFER.fullmatch(match[2]) if match else TASK_HEAD.fullmatch(name)
    return None if is_ignored else name
