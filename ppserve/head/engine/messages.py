"""What other threads may tell the engine: a closed set of typed messages, each handled in order of arrival.

What ranks say comes beside them, as `control.Heard` and `control.Gone`. A message that wants an answer carries the
future that will have it.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from ppserve.core.request import FinishReason, Request
from ppserve.head.engine.output import Sink
from ppserve.head.engine.replica import Reading
from ppserve.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue a request; its outputs go to `sink`. tokenizer: None where only token ids are served.

    accepted: done when it is queued; a RequestError when it is refused.
    """

    request: Request
    sink: Sink
    tokenizer: Tokenizer | None
    accepted: Future[None] = field(default_factory=Future, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request wherever it is; nothing happens when it has ended."""

    request_id: str
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Look:
    """Read the state of the pipeline, at rest between two turns."""

    seen: Future[Reading] = field(default_factory=Future, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Drain:
    """Streams may finish; a stage that is lost meanwhile is waited for less long."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Shut the stages down, front to back, and end the engine."""


Message = Submit | Abort | Look | Drain | Stop
