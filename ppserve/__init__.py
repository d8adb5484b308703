"""ppserve: pipeline-parallel text generation for the GPT-2 family.

    from ppserve import Pipeline

    with Pipeline("tiny", stages=2) as pipeline:
        print(pipeline.complete("Once upon a time", max_tokens=40, seed=1).text)

`Pipeline` runs a model in this process; `Client` and `AsyncClient` ask a server. A name is imported when it is
first used: asking a server needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppserve.answers import Chunk, Completion, Options
    from ppserve.client import AsyncClient, CallFailed, Client, RetryPolicy, Tls
    from ppserve.errors import ConfigError, InvalidRequest, PpserveError, RequestError, UsageError
    from ppserve.library.ledger import Ledger
    from ppserve.library.pipeline import Pipeline
    from ppserve.library.stream import Stream

__version__ = "0.1.0"

_HOMES = {
    "ppserve.answers": ("Chunk", "Completion", "Options"),
    "ppserve.client": ("AsyncClient", "CallFailed", "Client", "RetryPolicy", "Tls"),
    "ppserve.errors": ("ConfigError", "InvalidRequest", "PpserveError", "RequestError", "UsageError"),
    "ppserve.library.ledger": ("Ledger",),
    "ppserve.library.pipeline": ("Pipeline",),
    "ppserve.library.stream": ("Stream",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AsyncClient",
    "CallFailed",
    "Chunk",
    "Client",
    "Completion",
    "ConfigError",
    "InvalidRequest",
    "Ledger",
    "Options",
    "Pipeline",
    "PpserveError",
    "RequestError",
    "RetryPolicy",
    "Stream",
    "Tls",
    "UsageError",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'ppserve' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
