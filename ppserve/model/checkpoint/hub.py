"""Models of the Hugging Face hub, by id: from the local cache when they are there, else downloaded.

Needs the extra `ppserve[hub]`; imported only when an id is asked for. Only the weights in one format, the
configuration and the tokenizer are fetched, with huggingface-hub's own progress bars.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

from ppserve.errors import CheckpointError
from ppserve.model.checkpoint.files import read_json_object

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")

REQUIRED = "config.json"
OPTIONAL = ("generation_config.json", "tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json")
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def is_hub_id(name: str) -> bool:
    """`org/name`, or one of the oldest models' bare names; not anything that looks like a file."""
    return bool(HUB_ID.fullmatch(name)) and not re.search(r"\.(bin|pt|pth|safetensors|json)$|\.\.|--", name)


def fetch(model: str, cache_dir: Path | None = None, weights: bool = True) -> Path:
    """The local directory of a model's files, downloaded if need be. weights=False: configuration only.

    Raises CheckpointError when the model cannot be had: not installed, offline, or no such model.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        problem = "no such file or directory, and hub ids need the hub extra: pip install 'ppserve[hub]'"
        raise CheckpointError(model, problem) from error
    hub = huggingface_hub
    return _cached(hub, model, cache_dir, weights) or _download(hub, model, cache_dir, weights)


def _cached(hub: ModuleType, model: str, cache_dir: Path | None, weights: bool) -> Path | None:
    """The cached snapshot, if it is complete: nothing is asked of the network then."""

    def find(name: str) -> Path | None:
        found = hub.try_to_load_from_cache(model, name, cache_dir=cache_dir)
        return Path(found) if isinstance(found, str) else None

    try:
        config = find(REQUIRED)
        if config is None or not weights:
            return config and config.parent
        main = next(filter(None, map(find, WEIGHTS)), None)
        if main is None or (main.suffix == ".json" and not all(map(find, _indexed(main)))):
            return None
    except (OSError, ValueError) as error:
        raise CheckpointError(model, f"is not a usable hub id ({error})") from error
    return config.parent


def _download(hub: ModuleType, model: str, cache_dir: Path | None, weights: bool) -> Path:
    errors = hub.errors

    def get(name: str) -> Path:
        return Path(hub.hf_hub_download(model, name, cache_dir=cache_dir))

    def get_if_there(name: str) -> Path | None:
        try:
            return get(name)
        except errors.LocalEntryNotFoundError:
            raise
        except errors.EntryNotFoundError:
            return None

    try:
        directory = get(REQUIRED).parent
        for name in OPTIONAL:
            get_if_there(name)
        if weights:
            main = next(filter(None, map(get_if_there, WEIGHTS)), None)
            for name in _indexed(main) if main and main.suffix == ".json" else ():
                get(name)
    except errors.RepositoryNotFoundError as error:
        problem = "no such file or directory, and no such model on the hub, or no access to it"
        raise CheckpointError(model, problem) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        problem = "no such file or directory, not in the local hub cache, and the hub cannot be reached (offline?)"
        raise CheckpointError(model, problem) from error
    except errors.EntryNotFoundError as error:
        raise CheckpointError(model, f"the hub's model lacks a file: {_first_line(error)}") from error
    except (errors.HfHubHTTPError, OSError, ValueError) as error:
        raise CheckpointError(model, f"cannot be downloaded from the hub ({_first_line(error)})") from error
    return directory


def _indexed(index: Path) -> list[str]:
    """The files that an index names (their names are checked when the directory is opened)."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(index, "is not an object of tensors and files", field="weight_map")
    return sorted(set(weight_map.values()))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
