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
    """Seconds; see `Timings` in the proto. stage_busy_s: one per stage."""

    queue_s: float
    prefill_s: float
    ttft_s: float
    decode_s: float
    stage_busy_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """A token of one sequence, its end, or both.

    offset: the token's index among the generated tokens; without a token, their number. token_id: None if the
    sequence ends without a token. text: what the detokenizer released. matched: the token or string that ended the
    sequence. prompt_logprobs: of prompt tokens 1, 2, ..., in the first output of the request's first sequence.
    error: ends the whole request. cached_tokens and timings are valid with `finish`.
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
    """Takes the outputs of one request."""

    def push(self, outputs: Sequence[TokenOutput]) -> None:
        """The outputs of one turn of the engine. Called where `Engine.hand_over` runs; must return at once."""
