"""A Hugging Face directory: config.json beside safetensors or torch files, whole or split by an index.

Linears of this format are Conv1D, stored (in, out). Of a safetensors file only the header and the rows asked
for are ever read; the mapping that the official reader makes is closed again after each piece.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ppserve.core.architecture import Architecture
from ppserve.errors import CheckpointError
from ppserve.model.checkpoint.config_json import read_config
from ppserve.model.checkpoint.files import file_size, is_file, read_json_object, shown
from ppserve.model.checkpoint.names import LAYER_NAME, is_linear_weight, tensor_shapes
from ppserve.model.checkpoint.stored import Located, ScratchTensor, Stored, StoredCheckpoint, TensorFile
from ppserve.model.checkpoint.torch_bin import TorchFile, load_objects

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""In the order in which transformers looks for them."""

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
    arch, located = _settle_head(path, arch, _locate(path, arch, files))
    return StoredCheckpoint(path, arch, located)


class SafetensorsFile:
    """One .safetensors file, its header read. Implements `TensorFile`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        file_size(path)
        self.tensors: Mapping[str, Stored] = self._header()

    def rows(self, name: str, start: int, stop: int, scratch: ScratchTensor) -> torch.Tensor:
        try:
            with safe_open(self.path, framework="pt") as file:
                rows: torch.Tensor = file.get_slice(name)[start:stop]
                return rows
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(self.path, f"cannot be read ({shown(str(error))})", field=name) from error

    def _header(self) -> dict[str, Stored]:
        tensors: dict[str, Stored] = {}
        try:
            with safe_open(self.path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    part = file.get_slice(name)
                    dtype = str(part.get_dtype())
                    tensors[name] = Stored(tuple(part.get_shape()), SAFETENSORS_DTYPES.get(dtype, dtype))
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(self.path, f"is not a safetensors file ({shown(str(error))})") from error
        return tensors


def _open_file(path: Path) -> TensorFile:
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    return TorchFile(path, load_objects(path))


def _indexed_files(index: Path) -> list[TensorFile]:
    """The files that an index names, each opened once; what it says of each tensor must be true."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(index, "is not an object of tensors and files", field="weight_map")
    suffix = ".safetensors" if index.name.startswith("model.safetensors") else ".bin"
    files: dict[str, TensorFile] = {}
    for tensor, name in weight_map.items():
        if name not in files if isinstance(name, str) else True:
            files[name] = _open_file(_beside(index, name, suffix, tensor))
        if tensor not in files[name].tensors:
            problem = f"lacks this tensor, which {index.name} places in it"
            raise CheckpointError(files[name].path, problem, field=shown(tensor))
    return list(files.values())


def _beside(index: Path, name: Any, suffix: str, tensor: str) -> Path:
    """The file of an index entry: a plain name, and no way out of the directory.

    A link is followed within the directory, and from a snapshot of the hub's cache to that model's blobs.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[\w][\w.+-]{0,254}", name) or not name.endswith(suffix):
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


def _locate(path: Path, arch: Architecture, files: list[TensorFile]) -> dict[str, Located]:
    """Canonical names to places. Every stored tensor must be one that we know."""
    expected = tensor_shapes(arch)
    located: dict[str, Located] = {}
    for file in files:
        for stored_name in file.tensors:
            name = stored_name.removeprefix("transformer.")
            if _is_ignored(name):
                continue
            if name not in expected:
                raise CheckpointError(file.path, _unexpected(name, arch), field=shown(stored_name))
            if name in located:
                problem = f"is given twice: also in {located[name].file.path.name}"
                raise CheckpointError(file.path, problem, field=stored_name)
            located[name] = Located(file, stored_name, transposed=is_linear_weight(name))
    return located


def _is_ignored(name: str) -> bool:
    match = LAYER_NAME.fullmatch(name)
    return bool(MASK_BUFFER.fullmatch(match[2]) if match else TASK_HEAD.fullmatch(name))


def _unexpected(name: str, arch: Architecture) -> str:
    match = LAYER_NAME.fullmatch(name)
    if match and int(match[1]) >= arch.num_layers:
        return f"belongs to a layer that the config, with {arch.num_layers}, does not have"
    if "cross" in name or "q_attn" in name:
        return "belongs to cross attention, which is not served"
    return "is no tensor of a GPT-2"


def _settle_head(
    path: Path, arch: Architecture, located: dict[str, Located]
) -> tuple[Architecture, dict[str, Located]]:
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
    shape = (arch.padded_vocab_size, arch.width)
    if embedding.shape == head.shape == shape and not _is_one_tensor(embedding, head):
        return replace(arch, tied_embeddings=False), located
    return arch, located | {"lm_head.weight": embedding}


def _is_one_tensor(first: Located, second: Located) -> bool:
    file = first.file
    if isinstance(file, TorchFile) and file is second.file and file.same_place(first.name, second.name):
        return True
    return first.equals(second)
