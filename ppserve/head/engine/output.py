"""What a request's stream gets from the engine. Every protocol under `head/api` makes its messages from these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ppserve.core.plan import TokenLogprobs
from ppserve.core.request import FinishReason
from ppserve.errors import RequestError


@dataclass(frozen=True, slots=True)
class TimingsOutput:
    """The times of one answer; see `Timings` in the proto."""

    queue_s: float
    prefill_s: float
    ttft_s: float
    decode_s: float
    stage_busy_s: tuple[float, ...] = ()  # one per stage


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """A token of one sequence, its end, or both."""

    index: int  # of the sequence
    offset: int  # the token's index among the generated tokens; without a token, their number
    token_id: int | None = None  # None if the sequence ends without a token
    text: str = ""  # what the detokenizer released
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of prompt tokens 1, 2, ..., in the request's first output
    finish: FinishReason | None = None
    matched: int | str | None = None  # the token or string that ended the sequence
    error: RequestError | None = None  # ends the whole request
    cached_tokens: int = 0  # valid with `finish`, as is `timings`
    timings: TimingsOutput | None = None


class Sink(Protocol):
    """A receiver of one request's outputs."""

    def push(self, outputs: Sequence[TokenOutput]) -> None:
        """The outputs of one turn of the engine. Called where `Engine.hand_over` runs; must return at once."""
