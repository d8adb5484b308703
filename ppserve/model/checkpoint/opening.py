"""Opens the checkpoint that an operator names, whatever its format.

A name is `tiny`, one that `ppserve fetch` knows, a directory with config.json or with one ckpt.pt, llm.c or GGUF
file, such a file, or a hub id. Formats are recognised by content. The module that reads a format is imported when
it is needed, because a configuration can be read without torch.
"""

from __future__ import annotations

import os
import zipfile
from os.path import lexists
from pathlib import Path
from typing import TYPE_CHECKING

from ppserve.core.architecture import Architecture
from ppserve.errors import CheckpointError, did_you_mean
from ppserve.files import TINY, file_size, read_start, shown
from ppserve.gguf_file import MAGIC, PART
from ppserve.model.checkpoint import fetching, hub

if TYPE_CHECKING:
    from ppserve.model.checkpoint.tensors import FileCheckpoint

MAGICS = {".bin": (20240326).to_bytes(4, "little"), ".gguf": MAGIC}
"""The first bytes of llm.c's and llama.cpp's files, by suffix."""


def open_checkpoint(path: str) -> FileCheckpoint:
    """Open a checkpoint. Only headers are read, and the shape of every tensor is checked. Raises CheckpointError,
    which names the file and the field."""
    place = find_model(path)
    if place.is_dir():
        from ppserve.model.checkpoint.hf import open_directory

        return open_directory(place)
    return _open_file(place)


def read_architecture(path: str) -> Architecture:
    """Read a model's architecture. Of a directory or a hub id, only the configuration is needed. Raises
    CheckpointError."""
    place = find_model(path, weights=False)
    if place.is_dir():
        from ppserve.model.checkpoint.config_json import read_config

        return read_config(place)
    return _open_file(place).architecture


def is_on_hub(path: str) -> bool:
    """Return whether `path` means a model of the hub, which is downloaded unless an earlier start has done so."""
    return hub.is_hub_id(path) and not lexists(os.path.expanduser(path))


def find_model(path: str, weights: bool = True) -> Path:
    """Return the directory (with a config.json) or the file that `path` means. A model of the hub is downloaded.
    weights=False: only its configuration and tokenizer are. Raises CheckpointError."""
    if path == "tiny":
        return TINY
    if not path:
        raise CheckpointError("--model", "is empty")
    place = Path(os.path.expanduser(path))
    if not lexists(place) and path == fetching.NAME:
        return fetching.fetched()
    if is_on_hub(path):
        return hub.fetch(path, weights=weights)
    if not lexists(place):
        hint = did_you_mean(path, ("tiny", fetching.NAME)) or "; a model on the hub is called org/name"
        is_address = "://" in path
        problem = "is an address" if is_address else "no such file or directory"
        raise CheckpointError(shown(path), problem + hint)
    is_whole = any(lexists(place / name) for name in hub.WEIGHT_FILES) and lexists(place / "config.json")
    return _only_file(place) if place.is_dir() and not is_whole else place


def _only_file(directory: Path) -> Path:
    """Return the only checkpoint file of a directory without config.json, or the only GGUF of one with
    config.json. If the model is in parts, return the first part. If there is only a config.json, return the
    directory. Raises CheckpointError if there is none of these, or several models."""
    has_config = lexists(directory / "config.json")
    if lexists(directory / "ckpt.pt") and not has_config:
        return directory / "ckpt.pt"
    suffixes = {".gguf"} if has_config else MAGICS.keys()
    files = [path for path in sorted(directory.iterdir()) if path.suffix in suffixes and path.is_file()]
    files = [path for path in files if read_start(path, 4) == MAGICS[path.suffix]]
    parts = {PART.sub(r"\1 \3", path.name): path for path in reversed(files)}
    if len(parts) == 1:
        return next(iter(parts.values()))
    if parts:
        names = ", ".join(sorted(path.name for path in parts.values()))
        raise CheckpointError(directory, f"holds several models, name one: {names}")
    if has_config:
        return directory
    problem = f"holds no config.json, no ckpt.pt, no .gguf and no model of llm.c{hub.other_content(directory)}"
    raise CheckpointError(directory, problem)


def _open_file(path: Path) -> FileCheckpoint:
    if file_size(path) == 0:
        raise CheckpointError(path, "is empty")
    if path.suffix == ".safetensors" or path.name in {"config.json", "pytorch_model.bin"}:
        raise CheckpointError(path, "name the directory that holds it, config.json and the tokenizer")
    if path.suffix == ".gguf" or read_start(path, 4) == MAGICS[".gguf"]:
        from ppserve.model.checkpoint.gguf import open_gguf

        return open_gguf(path)
    if path.suffix in {".pt", ".pth"} or zipfile.is_zipfile(path):
        from ppserve.model.checkpoint.torch_save import open_nanogpt

        return open_nanogpt(path)
    from ppserve.model.checkpoint.llmc import open_llmc

    return open_llmc(path)
