"""Models of the Hugging Face hub, by id: from the local cache if they are there, else downloaded.

It needs the package huggingface-hub (the extra `hub`), which is imported only when an id is asked for. The weights
in one format, the configuration and the tokenizer are downloaded, with huggingface-hub's progress bars.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from os.path import lexists
from pathlib import Path
from typing import Annotated

import msgspec

from ppserve.errors import CheckpointError
from ppserve.files import read_json, reason, shown, within

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
ANSWER_TIMEOUT_S = 5.0
"""The hub must give its first answer, before anything is downloaded, within so many seconds."""

REQUIRED = "config.json"
OPTIONAL = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("vocab.json", "merges.txt", "added_tokens.json"),
)
WEIGHT_FILES = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""The files that may have the weights, in the order in which transformers looks for them."""


class _Index(msgspec.Struct, frozen=True):
    weight_map: Annotated[dict[str, str], msgspec.Meta(min_length=1)]


OTHER_CONTENT = {
    "adapter_config.json": "adapters (LoRA): merge them into their base model, as peft's merge_and_unload does",
    "params.json": "a model in its makers' own format: take that of Hugging Face",
    "mlc-chat-config.json": "a model of MLC",
    "*.onnx": "an ONNX model",
    "onnx/*.onnx": "an ONNX model",
    "*.h5": "weights of TensorFlow",
    "*.msgpack": "weights of Flax",
    "*.npz": "arrays of NumPy, as of MLX",
    "*.nemo": "a model of NeMo",
    "*.safetensors": "safetensors, but no model.safetensors and no index",
    "*.bin": "weights without their config.json, or under another name",
    "*.pth": "weights of PyTorch under another name",
}
"""Patterns of files that a directory without a model may have, and what they are."""


def other_content(directory: Path) -> str:
    """Return what a directory has in place of a model, as the end of a sentence; empty if nothing is
    recognised."""
    found = ((kind, next(directory.glob(name), None)) for name, kind in OTHER_CONTENT.items())
    return next((f"; {path.relative_to(directory)}: {kind}" for kind, path in found if path), "")


def weight_files(directory: Path) -> list[Path]:
    """Return the file with the weights, or an index and then the files that it names. Raises CheckpointError."""
    path = next((directory / name for name in WEIGHT_FILES if lexists(directory / name)), None)
    if path is None:
        raise CheckpointError(directory, f"holds none of {', '.join(WEIGHT_FILES)}{other_content(directory)}")
    suffix = ".safetensors" if ".safetensors" in path.suffixes else ".bin"
    names = sorted(set(read_json(path, _Index).weight_map.values())) if path.suffix == ".json" else []
    for name in names:
        if not re.fullmatch(r"[\w][\w.+-]{0,254}", name) or not name.endswith(suffix):
            raise CheckpointError(path, f"{shown(name)} is not the plain name of a {suffix} file", "weight_map")
    return [path, *(directory / name for name in names)]


def is_hub_id(name: str) -> bool:
    """Return whether a name has the form `org/name` and does not look like a file."""
    return bool(HUB_ID.fullmatch(name)) and not re.search(r"\.(bin|pt|pth|safetensors|json)$|\.\.|--", name)


def fetch(model: str, weights: bool = True) -> Path:
    """Return the local directory of a model's files; download them if they are missing. weights=False: the
    configuration and the tokenizer are enough. Raises CheckpointError."""
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError as error:
        problem = "no such file or directory, and hub ids need a package: pip install huggingface-hub"
        raise CheckpointError(model, problem) from error
    cached = hub.try_to_load_from_cache(model, REQUIRED)
    if isinstance(cached, str) and (not weights or _has_weights(Path(cached).parent)):
        return Path(cached).parent
    try:
        # This is asked once, without retries: a download would repeat it for 23 s.
        answer = within(ANSWER_TIMEOUT_S, lambda: hub.HfApi().model_info(model))
        offered = {file.rfilename for file in answer.siblings or ()}
        return _download(partial(hub.hf_hub_download, model), model, offered, weights)
    except CheckpointError:
        raise
    except errors.RepositoryNotFoundError as error:
        problem = "no such file or directory, and no such model on the hub, or no access to it"
        raise CheckpointError(model, problem) from error
    except Exception as error:  # which HTTP library's error it is depends on the version of huggingface-hub
        problem = "no such file or directory, not in the local hub cache, and the hub cannot be asked"
        raise CheckpointError(model, f"{problem} ({reason(error)})") from error


def _has_weights(directory: Path) -> bool:
    is_any = any((directory / name).exists() for name in WEIGHT_FILES)
    return is_any and all(path.exists() for path in weight_files(directory))


def _download(download: Callable[[str], str], model: str, offered: set[str], weights: bool) -> Path:
    """Download the offered files that are needed. Return their directory."""
    main = [name for name in WEIGHT_FILES if name in offered][:1]
    if REQUIRED not in offered or (weights and not main):
        problem = f"the hub's model has no {REQUIRED}, or none of {', '.join(WEIGHT_FILES)}"
        if files := sorted(name for name in offered if name.endswith(".gguf")):
            problem = f"the hub's model is a GGUF: download it and name the file; there are {', '.join(files)}"
        raise CheckpointError(model, problem)
    directory = Path(download(REQUIRED)).parent
    for name in (*offered.intersection(OPTIONAL), *(main if weights else ())):
        download(name)
    for part in weight_files(directory)[1:] if weights else ():
        download(part.name)
    return directory
