"""Files that torch.save wrote, mapped into memory: Hugging Face's `.bin`, and nanoGPT's `ckpt.pt`.

A `ckpt.pt` has model_args, a state dict, and an optimizer's state, which is never read. Linear layers are (out,
in), GELU is the exact form, the epsilon of layer norms is 1e-5, and `bias=False` applies to layer norms too.
(Layout: karpathy/nanoGPT, train.py, model.py.)
"""

from __future__ import annotations

import re
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from ppserve.core.architecture import Architecture
from ppserve.errors import CheckpointError
from ppserve.files import checked, file_size, misread, read_start, reason, shown
from ppserve.model.checkpoint import settings
from ppserve.model.checkpoint.families import FAMILIES
from ppserve.model.checkpoint.gpt2 import GPT2Config
from ppserve.model.checkpoint.tensors import FileCheckpoint, StoredTensor


class ModelArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The values from which nanoGPT builds its model."""

    n_layer: settings.Layers
    n_head: settings.Width
    n_embd: settings.Width
    block_size: settings.Positions
    vocab_size: settings.Rows
    bias: bool = True
    dropout: Any = None


def open_nanogpt(path: Path) -> FileCheckpoint:
    """Open a ckpt.pt. Raises CheckpointError."""
    objects = _load(path)
    if not isinstance(objects, dict) or not {"model", "model_args"} <= objects.keys():
        raise CheckpointError(path, "holds no model_args and model: not a checkpoint of nanoGPT")
    arch = _architecture(path, checked(path, objects["model_args"], ModelArgs))
    return FileCheckpoint(path, arch, _stored_tensors(path, objects["model"], field="model"), _canonical)


def read_state_dict(path: Path) -> list[StoredTensor]:
    """Return the tensors of a file that has nothing else. Raises CheckpointError."""
    return _stored_tensors(path, _load(path))


def _architecture(path: Path, args: ModelArgs) -> Architecture:
    vocab_size, _ = settings.real_vocabulary(path.parent, args.vocab_size, settings.END_OF_TEXT)
    config = GPT2Config(
        n_layer=args.n_layer,
        n_embd=args.n_embd,
        n_head=args.n_head,
        n_positions=args.block_size,
        vocab_size=args.vocab_size,
        activation_function="gelu",
        eos_token_id=settings.END_OF_TEXT if vocab_size == settings.GPT2_VOCABULARY else None,
    )
    arch = config.architecture(path, have_biases=args.bias)
    return settings.checked_architecture(path, replace(arch, vocab_size=vocab_size), "n_head")


def _canonical(stored_name: str) -> str | None:
    """Return the canonical name. torch.compile and DistributedDataParallel put prefixes in front, which are
    dropped."""
    for prefix in ("module.", "_orig_mod.", "module."):
        stored_name = stored_name.removeprefix(prefix)
    return FAMILIES["gpt2"].hugging_face_name(stored_name)


def _load(path: Path) -> Any:
    """Return what torch.save was given. Tensors are mapped; those of the old format, which is no zip, are read.
    Raises CheckpointError if the file is damaged, or has anything but tensors and plain values."""
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
        # Only one line of torch's message names the cause. The rest says how to load the file carelessly.
        found = re.search(r"Unsupported (?:global: GLOBAL|class) (\S+)", str(error))
        # A text file that begins with a c is no pickle, though torch's message then names a global, too.
        if found and read_start(path, 2).startswith((b"PK", b"\x80")):
            problem = f"holds {shown(found[1])}, code that would run; only tensors are read: save a state_dict()"
            raise CheckpointError(path, problem) from error
        cause = re.search(r"(?:WeightsUnpickler error:|Trying to load)\s+(.+)", str(error))
        problem = shown(cause[1], 120) if cause else reason(error)
        raise misread(path, "a file of torch.save", problem, "a zip archive", "a pickle") from error


def _check_archive(path: Path) -> None:
    """Raise CheckpointError if an entry is compressed: torch would take its bytes for numbers."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise CheckpointError(path, "is compressed, which torch.save never does", shown(entry.filename))


def _stored_tensors(path: Path, state: object, field: str | None = None) -> list[StoredTensor]:
    """Return the tensors of a state dict. field: where in the file it was found. Raises CheckpointError."""
    if not isinstance(state, dict):
        raise CheckpointError(path, f"holds a {type(state).__name__}, not a dict of tensors", field=field)
    return [_stored(path, name, tensor) for name, tensor in state.items()]


def _stored(path: Path, name: object, tensor: object) -> StoredTensor:
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise CheckpointError(path, "is not a tensor under its name", field=shown(name))
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise CheckpointError(path, "is not a plain tensor", field=shown(name))
    # With strides of 0, a small file could claim a tensor of any size.
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise CheckpointError(path, "reaches beyond what is stored", field=shown(name))
    dtype = str(tensor.dtype).removeprefix("torch.")
    return StoredTensor(path, name, tuple(tensor.shape), dtype, tensor)
