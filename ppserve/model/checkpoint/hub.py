"""Models of the Hugging Face hub, by id: from the local cache when they are there, else downloaded.

Needs the extra `ppserve[hub]`; imported only when an id is asked for. Only the weights in one format, the
configuration and the tokenizer are fetched, with huggingface-hub's own progress bars.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ppserve.errors import CheckpointError
from ppserve.files import read_json, reason, within

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
ANSWER_TIMEOUT_S = 5.0
"""For the hub's first answer, before anything is downloaded."""

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
    """Whether it has the form `org/name` and does not look like a file."""
    return bool(HUB_ID.fullmatch(name)) and not re.search(r"\.(bin|pt|pth|safetensors|json)$|\.\.|--", name)


def fetch(model: str, weights: bool = True) -> Path:
    """The local directory of a model's files, downloaded if need be. weights=False: configuration only.

    Raises CheckpointError when the model cannot be had: not installed, offline, or no such model.
    """
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError as error:
        problem = "no such file or directory, and hub ids need the hub extra: pip install 'ppserve[hub]'"
        raise CheckpointError(model, problem) from error
    cached = hub.try_to_load_from_cache(model, REQUIRED)
    if isinstance(cached, str) and _is_complete(Path(cached).parent, weights):
        return Path(cached).parent
    try:
        # One question without retries: a download would repeat it for 23 s.
        answer = within(ANSWER_TIMEOUT_S, lambda: hub.HfApi().model_info(model))
        names = _needed(model, {file.rfilename for file in answer.siblings or ()}, weights)
        paths = [Path(hub.hf_hub_download(model, name)) for name in names]
    except CheckpointError:
        raise
    except errors.RepositoryNotFoundError as error:
        problem = "no such file or directory, and no such model on the hub, or no access to it"
        raise CheckpointError(model, problem) from error
    except Exception as error:  # of several HTTP libraries, by the version of huggingface-hub
        problem = "no such file or directory, not in the local hub cache, and the hub cannot be asked"
        raise CheckpointError(model, f"{problem} ({reason(error)})") from error
    return paths[0].parent


def _is_complete(directory: Path, weights: bool) -> bool:
    """Whether all that `open_directory` reads is there; the configuration is."""
    main = next((directory / name for name in WEIGHT_FILES if (directory / name).exists()), None)
    if not weights or main is None:
        return not weights
    parts = set(read_index(main).values()) if main.suffix == ".json" else set()
    return all((directory / part).exists() for part in parts)


def _needed(model: str, offered: set[str], weights: bool) -> Iterator[str]:
    """Which of the files that the hub offers are downloaded, the configuration first."""
    if REQUIRED not in offered:
        raise CheckpointError(model, f"the hub's model has no {REQUIRED}")
    yield REQUIRED
    yield from (name for name in OPTIONAL if name in offered)
    if not weights:
        return
    main = next((name for name in WEIGHT_FILES if name in offered), None)
    if main is None:
        raise CheckpointError(model, f"the hub's model has none of {', '.join(WEIGHT_FILES)}")
    yield main
    stem, suffix, *index = main.split(".", 2)
    if index:
        yield from sorted(name for name in offered if re.fullmatch(rf"{stem}-[\d-]+of-\d+\.{suffix}", name))
