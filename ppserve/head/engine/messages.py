"""Messages from other threads to the engine. They are handled in order of arrival.

Messages from ranks are `control.Heard` and `control.Gone`. A message that needs an answer carries a future for it.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from ppserve.core.request import FinishReason, Request
from ppserve.head.engine.member import FatalError
from ppserve.head.engine.open_request import HeldAnswer
from ppserve.head.engine.output import Sink
from ppserve.head.engine.reading import ReplicaReading
from ppserve.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue a request. Its outputs go to `sink`. tokenizer: None where only token ids are served. held: of a
    request that resumes an answer.

    accepted: done when the request is queued; a RequestError if it is refused.
    """

    request: Request
    sink: Sink
    tokenizer: Tokenizer | None
    held: HeldAnswer | None = None
    accepted: Future[None] = field(default_factory=Future, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request. Nothing happens if it has ended."""

    request_id: str
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Read the state of every replica."""

    readings: Future[tuple[ReplicaReading, ...]] = field(default_factory=Future, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Drain:
    """The server is stopping: open streams may finish, and a lost stage must come back sooner than usual."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Shut the stages down, in order, and end the engine."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart the stage processes of a replica. pauses: also if no other replica could go on with its streams.

    done: when it serves again; a RequestError if it is refused, or the replica does not come back.
    """

    replica: int
    pauses: bool
    done: Future[None] = field(default_factory=Future, repr=False, compare=False)


Message = Submit | Abort | Snapshot | Restart | Drain | Stop | FatalError
