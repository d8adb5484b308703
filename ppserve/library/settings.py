"""The settings of a pipeline of the library: the server's configuration, with names of arguments in place of
flags."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypedDict, get_type_hints

from msgspec import Meta

from ppserve import config as cfg
from ppserve.answers import Texts, read_options
from ppserve.core.architecture import Split
from ppserve.errors import ConfigError, InvalidRequest, UsageError, Violation
from ppserve.head.api.requests import renamed

_FLAG = re.compile(r"(?<![\w/-])--([a-z][a-z-]*[a-z])")  # a part of a path is no flag

Count = Annotated[int, Meta(ge=1)]


class Settings(TypedDict, total=False):
    """The settings of a pipeline. Each is the flag of `ppserve serve` with the same name; None is the same as
    unset.

    layers: those of each stage, as [7.5, 4.5]; unset: stages have equal weights. tensor_parallel: how many ranks,
    each a thread, compute each stage together. devices: those of the ranks in the order of stages, as ["cuda:0",
    "cuda:1"]. threads: how many each rank computes with. speculate: how many draft tokens each sequence has in a
    step; unset: as many as pay. chat_template: the path of a Jinja template, in place of the model's own. Sizes
    are in bytes.
    """

    dtype: str
    quantization: str
    kv_dtype: str
    force_cpu: bool
    max_model_len: Count
    layers: str | Sequence[float]
    microbatches: Count
    threads: Count
    tensor_parallel: Count
    block_size: Count
    kv_cache_memory: Count
    max_num_seqs: Count
    max_queue: Count
    prefill_chunk: Count
    speculate: Annotated[int, Meta(ge=0)]
    replicas: Count
    batch_invariant: bool
    cuda_graphs: bool
    devices: Texts
    chat_template: str


_KINDS = {"stages": Count, **get_type_hints(Settings, include_extras=True)}
_CHOICES = {"dtype": cfg.DTYPES, "quantization": cfg.QUANTIZATIONS, "kv_dtype": cfg.KV_DTYPES}


def parse_settings(model: str | os.PathLike[str], settings: Mapping[str, Any]) -> tuple[cfg.ServeConfig, int]:
    """Return the configuration and the number of ranks. Raises UsageError, which names the setting."""
    if not isinstance(model, str | os.PathLike):
        raise ConfigError("model", f"{model!r} is neither a name nor a path")
    try:
        given = read_options(settings, _KINDS)
        if "layers" in given:
            given["layers"] = _split(given["layers"])
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    for name, choices in _CHOICES.items():
        if given.get(name, choices[0]) not in choices:
            raise ConfigError(name, f"{given[name]!r} is none of {', '.join(choices)}")
    if "chat_template" in given:
        given["chat_template"] = Path(given["chat_template"])
    stages = given.pop("stages", None)
    config = cfg.ServeConfig.from_flags({"path": os.fspath(model), "transport": "local", **given})
    ranks_per_stage = config.pipeline.tensor_parallel * config.pipeline.replicas
    return config, ranks_per_stage * (stages or max(1, len(given.get("devices", ())) // ranks_per_stage))


def _split(layers: str | Sequence[float]) -> Split:
    """Read the layers of each stage. Raises ValueError."""
    return Split.parse(layers if isinstance(layers, str) else ",".join(f"{each:g}" for each in layers))


def as_arguments(text: str) -> str:
    """Return a text in which flags have the names of arguments: `max_model_len` for `--max-model-len`."""
    return _FLAG.sub(lambda found: found[1].replace("-", "_"), text)


def in_arguments(error: InvalidRequest) -> InvalidRequest:
    """Return an error in which the proto's fields, and flags, have the names of arguments."""
    violations = renamed(error, {"token_ids.ids": "prompt"}).violations
    return InvalidRequest([Violation(each.field, as_arguments(each.problem)) for each in violations])


@contextmanager
def naming_arguments() -> Iterator[None]:
    """Let errors in the block name arguments instead of flags."""
    try:
        yield
    except UsageError as error:
        error.args = (as_arguments(str(error)),)
        if isinstance(error, ConfigError):
            error.name = as_arguments(error.name)
        raise
