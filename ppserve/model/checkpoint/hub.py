"""Models of the Hugging Face hub, by id: from the local cache when they are there, else downloaded.

Needs the extra `ppserve[hub]`; imported only when an id is asked for. Only the weights in one format, the
configuration and the tokenizer are fetched, with huggingface-hub's own progress bars.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from ppserve.errors import CheckpointError
from ppserve.files import read_json, reason

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")

REQUIRED = "config.json"
OPTIONAL = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("vocab.json", "merges.txt", "added_tokens.json"),
)
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""In the order in which transformers looks for them."""


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def read_index(path: Path) -> dict[str, str]:
    """Which file holds each tensor, as an index says. Raises CheckpointError."""
    weight_map = read_json(path, _Index).weight_map
    if not weight_map:
        raise CheckpointError(path, "names no tensors", field="weight_map")
    return weight_map


def is_hub_id(name: str) -> bool:
    """`org/name`, or one of the oldest models' bare names; not anything that looks like a file."""
    return bool(HUB_ID.fullmatch(name)) and not re.search(r"\.(bin|pt|pth|safetensors|json)$|\.\.|--", name)


def fetch(model: str, cache_dir: Path | None = None, weights: bool = True) -> Path:
    """The local directory of a model's files, downloaded if need be. weights=False: configuration only.

    Raises CheckpointError when the model cannot be had: not installed, offline, or no such model.
    """
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError as error:
        problem = "no such file or directory, and hub ids need the hub extra: pip install 'ppserve[hub]'"
        raise CheckpointError(model, problem) from error

    def cached(name: str, required: bool) -> Path | None:
        found = hub.try_to_load_from_cache(model, name, cache_dir=cache_dir)
        return Path(found) if isinstance(found, str) else None

    def downloaded(name: str, required: bool) -> Path | None:
        try:
            return Path(hub.hf_hub_download(model, name, cache_dir=cache_dir))
        except errors.EntryNotFoundError as error:
            if required or isinstance(error, errors.LocalEntryNotFoundError):
                raise
            return None

    try:
        # If all is in the cache, nothing is asked of the network.
        directory = _collect(cached, weights) or _collect(downloaded, weights)
    except errors.RepositoryNotFoundError as error:
        problem = "no such file or directory, and no such model on the hub, or no access to it"
        raise CheckpointError(model, problem) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        problem = "no such file or directory, not in the local hub cache, and the hub cannot be reached (offline?)"
        raise CheckpointError(model, problem) from error
    except errors.EntryNotFoundError as error:
        raise CheckpointError(model, f"the hub's model lacks a file: {reason(error)}") from error
    except (errors.HfHubHTTPError, OSError, ValueError) as error:
        raise CheckpointError(model, f"cannot be had from the hub ({reason(error)})") from error
    if directory is None:
        raise CheckpointError(model, f"the hub's model has none of {', '.join(WEIGHT_FILES)}")
    return directory


def _collect(get: Callable[[str, bool], Path | None], weights: bool) -> Path | None:
    """The directory in which a model's files were found; None where one is missing.

    get: from a file's name, and whether it must be there, to where it is now.
    """
    config = get(REQUIRED, True)
    if config is None:
        return None
    for name in OPTIONAL:
        get(name, False)
    if weights:
        main = next((path for name in WEIGHT_FILES if (path := get(name, False))), None)
        parts = set(read_index(main).values()) if main and main.suffix == ".json" else set()
        if main is None or not all(get(name, True) for name in sorted(parts)):
            return None
    return config.parent
