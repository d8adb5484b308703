"""What the engine tells one request's reader: a token, an end, or both, in the values of `core`.

Every protocol under `head/api` makes its own messages from these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ppserve.core.plan import TokenLogprobs
from ppserve.core.request import FinishReason
from ppserve.errors import RequestError


@dataclass(frozen=True, slots=True)
class TimingsOutput:
    """Seconds; see `Timings` in the proto. stage_busy_s: one per stage."""

    queue_s: float
    prefill_s: float
    ttft_s: float
    decode_s: float
    stage_busy_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What one step brought for one sequence.

    offset: of this token among the generated tokens; without a token, how many there are. token_id: None
    when the sequence ends without one. text: what the detokenizer released. matched: the token or string
    that ended it. prompt_logprobs: for prompt tokens 1, 2, ..., with the first output of the request's first
    sequence. error: the whole request ends with it. cached_tokens and timings count with `finish`.
    """

    index: int
    offset: int
    token_id: int | None = None
    text: str = ""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    matched: int | str | None = None
    error: RequestError | None = None
    cached_tokens: int = 0
    timings: TimingsOutput | None = None


class Sink(Protocol):
    """Where the engine delivers what it has for one request."""

    def push(self, outputs: Sequence[TokenOutput]) -> None:
        """Take one step's outputs. Called in the event loop's thread; returns at once."""
