"""ppserve: pipeline-parallel text generation for GPT-2 and the Llamas.

    from ppserve import Pipeline

    with Pipeline("tiny", stages=2) as pipeline:
        print(pipeline.complete("Once upon a time", max_tokens=40, seed=1).text)

`Pipeline` runs a model in this process; `Client` and `AsyncClient` ask a server. The rest are the parts of a
pipeline, for those who take one apart: `demo.py` is built from these names alone. A name is imported when it is
first used, so asking a server needs no torch.
"""

# mypy: implicit_reexport=True
# ruff: noqa: F401, F403

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppserve.answers import Chunk, Completion, Options
    from ppserve.client import AsyncClient, CallFailed, Client, RetryPolicy, Tls
    from ppserve.errors import ConfigError, InvalidRequest, PpserveError, RequestError, UsageError
    from ppserve.grammar.structured_output import StructuredOutput
    from ppserve.library import *

__version__ = "0.1.0"
_NAMES = {
    "ppserve.answers": "Chunk Completion Options",
    "ppserve.client": "AsyncClient CallFailed Client RetryPolicy Tls",
    "ppserve.errors": "ConfigError InvalidRequest PpserveError RequestError UsageError",
    "ppserve.grammar.structured_output": "StructuredOutput",
    "ppserve.library": """BUSY CAUSES IDLE Architecture Checkpoint Computed Decoder DeviceSetup Draw Frames
        GPT2Config Ledger Pipeline SamplingParams Slice Split Stage StageLayout StageTimes StepPlan Stream
        TensorPart Transport
        balance between connect create_transport decode_parts load_stage load_tokenizer open_checkpoint
        read_architecture read_ledger shares split_by_weight stage_layouts stage_params""",
}
_HOME_OF = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'ppserve' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
