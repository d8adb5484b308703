"""A Hugging Face directory: config.json beside safetensors or torch files, whole or split by an index.

Linears of this format are Conv1D, stored (in, out). Of a safetensors file only the header and the rows asked
for are ever read; the mapping that the official reader makes is closed again after each piece.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ppserve.core.architecture import Architecture
from ppserve.errors import CheckpointError
from ppserve.files import file_size, is_file, reason, shown
from ppserve.model.checkpoint.config_json import read_config
from ppserve.model.checkpoint.hub import WEIGHT_FILES, read_index
from ppserve.model.checkpoint.names import LAYER_NAME
from ppserve.model.checkpoint.stored import Located, ScratchTensor, Stored, StoredCheckpoint, TensorFile, locate
from ppserve.model.checkpoint.torch_bin import TorchFile, load_objects

SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

MASK_BUFFER = re.compile(r"attn\.(bias|masked_bias)")
TASK_HEAD = re.compile(r"(score|classifier|qa_outputs|multiple_choice_head|v_head)\..+")


def open_directory(directory: Path) -> StoredCheckpoint:
    """Open config.json and the weights beside it. Raises CheckpointError."""
    arch = read_config(directory)
    name = next((name for name in WEIGHT_FILES if is_file(directory / name)), None)
    if name is None:
        raise CheckpointError(directory, f"holds none of {', '.join(WEIGHT_FILES)}")
    path = directory / name
    files = _indexed_files(path) if name.endswith(".json") else [_open_file(path)]
    arch, located = _settle_head(arch, locate(files, arch, _canonical, in_out=True))
    return StoredCheckpoint(path, arch, located)


class SafetensorsFile:
    """One .safetensors file, its header read. Implements `TensorFile`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        file_size(path)
        self.tensors: Mapping[str, Stored] = self._header()

    def is_one(self, name: str, other: str) -> bool:
        return name == other

    def rows(self, name: str, start: int, stop: int, scratch: ScratchTensor) -> torch.Tensor:
        try:
            with safe_open(self.path, framework="pt") as file:
                rows: torch.Tensor = file.get_slice(name)[start:stop]
                return rows
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(self.path, f"cannot be read ({reason(error)})", field=name) from error

    def _header(self) -> dict[str, Stored]:
        tensors: dict[str, Stored] = {}
        try:
            with safe_open(self.path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    part = file.get_slice(name)
                    dtype = str(part.get_dtype())
                    tensors[name] = Stored(tuple(part.get_shape()), SAFETENSORS_DTYPES.get(dtype, dtype))
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(self.path, f"is not a safetensors file ({reason(error)})") from error
        return tensors


def _open_file(path: Path) -> TensorFile:
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    return TorchFile(path, load_objects(path))


def _indexed_files(index: Path) -> list[TensorFile]:
    """The files that an index names, each opened once; what it says of each tensor must be true."""
    suffix = ".safetensors" if index.name.startswith("model.safetensors") else ".bin"
    files: dict[str, TensorFile] = {}
    for tensor, name in read_index(index).items():
        if name not in files:
            files[name] = _open_file(_beside(index, name, suffix, tensor))
        if tensor not in files[name].tensors:
            problem = f"lacks this tensor, which {index.name} places in it"
            raise CheckpointError(files[name].path, problem, field=shown(tensor))
    return list(files.values())


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


def _settle_head(arch: Architecture, located: dict[str, Located]) -> tuple[Architecture, dict[str, Located]]:
    """Which matrix is the LM head, decided as transformers does.

    Untied: the stored one. Tied: the embedding, or the head where only that is stored; and where both are
    stored and differ, the config is taken to be wrong and they stay apart.
    """
    embedding, head = located.get("wte.weight"), located.get("lm_head.weight")
    if not arch.tied_embeddings or (embedding is None and head is None):
        return arch, located
    if embedding is None or head is None:
        only = embedding or head
        assert only is not None
        return arch, located | {"wte.weight": only, "lm_head.weight": only}
    if not embedding.equals(head):
        return replace(arch, tied_embeddings=False), located
    return arch, located | {"lm_head.weight": embedding}
