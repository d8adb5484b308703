"""ppserve: pipeline-parallel text generation for GPT-2 and the Llamas.

    from ppserve import Pipeline

    with Pipeline("tiny", stages=2) as pipeline:
        print(pipeline.complete("Once upon a time", max_tokens=40, seed=1).text)

`Pipeline` and `AsyncPipeline` run a model in this process; `Client` and `AsyncClient` ask a server. In all of them
`complete` returns an answer and `stream` yields it. The parts of a pipeline, for those who take one apart, are in
`ppserve.library`. A name is imported when it is first used, so asking a server needs no torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing `typing` would take longer than all of this
if TYPE_CHECKING:
    from typing import Any

    from ppserve.answers import Chunk, Completion, Finish, Options, Timings, Token, Usage
    from ppserve.client import AsyncClient, CallFailed, Client, RetryPolicy, Tls
    from ppserve.errors import ConfigError, InvalidRequest, PpserveError, RequestError, UsageError
    from ppserve.grammar.structured_output import StructuredOutput
    from ppserve.library import AsyncPipeline, Ledger, Pipeline, Stream

__version__ = "0.1.0"
__all__ = [
    "AsyncClient",
    "AsyncPipeline",
    "CallFailed",
    "Chunk",
    "Client",
    "Completion",
    "ConfigError",
    "Finish",
    "InvalidRequest",
    "Ledger",
    "Options",
    "Pipeline",
    "PpserveError",
    "RequestError",
    "RetryPolicy",
    "Stream",
    "StructuredOutput",
    "Timings",
    "Tls",
    "Token",
    "Usage",
    "UsageError",
]
_NAMES = {
    "ppserve.answers": "Chunk Completion Finish Options Timings Token Usage",
    "ppserve.client": "AsyncClient CallFailed Client RetryPolicy Tls",
    "ppserve.errors": "ConfigError InvalidRequest PpserveError RequestError UsageError",
    "ppserve.grammar.structured_output": "StructuredOutput",
    "ppserve.library": "AsyncPipeline Ledger Pipeline Stream",
}
_HOME_OF = {name: home for home, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'ppserve' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
