"""One request until it is answered, over as many calls as that takes. It has no sockets, no clock and no sleep.

When a stream breaks, the next request holds the received token ids (`ResumeFrom`), and the server continues.
Text may lag behind tokens, but a message that completes text also holds the tokens that complete it.
So the received tokens determine the received text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from ppserve.answers import Chunk
from ppserve.client.messages import CallFailed, read_chunk
from ppserve.v1 import generation_pb2 as pb

log = logging.getLogger("ppserve.client")

# A client that retries less often could miss a server that serves only for a short time.
_UNANSWERED_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a call is tried again, and how long the pauses between attempts are."""

    max_attempts: int | None = None
    """Give up after this many failed attempts in a row. It does not apply to a stream that has begun."""
    resume_timeout_s: float = 120.0
    """Seconds from the first of several failures in a row to the last attempt.
    A server may need minutes to read its weights."""
    first_pause_s: float = 0.1
    """Seconds before the second attempt. Each pause is twice the one before, up to `max_pause_s`; while no server
    answers, up to a second."""
    max_pause_s: float = 5.0
    resume: bool = True
    """Whether to continue a broken stream. For this the server sends token ids."""
    on_retry: Callable[[CallFailed], None] | None = None
    """A function that gets each failure that is retried. If None, the first of several in a row is logged."""


class Retries:
    """The count of failures in a row, and the first of them."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._failures = 0
        self._since_s = 0.0
        self._first: CallFailed | None = None

    def progress(self) -> None:
        """Record that a message arrived, so earlier failures do not count any more."""
        self._failures = 0
        self._first = None

    def pause_after(self, failure: CallFailed, now_s: float, has_begun: bool = False) -> float:
        """Return the seconds to wait before the next attempt: at least as long as the server asks for.

        has_begun: whether the call is a stream that had begun. Raises `failure` after the last attempt, and where
        a retry does not help. It helps if no server answers (UNAVAILABLE), or if the queue is full and the server
        says how long to wait.
        """
        first, policy = self._first, self._policy
        self._failures += 1
        if first is None:
            self._since_s = now_s
        if first is None or (failure.reason and not first.reason):
            self._first = failure  # a server's reason tells more than no answer
        if self._is_final(failure, now_s, has_begun):
            raise failure from (first if str(first) != str(failure) else None)
        if policy.on_retry is not None:
            policy.on_retry(failure)
        elif first is None:
            log.warning("trying again for up to %g s after: %s", policy.resume_timeout_s, failure)
        longest_s = policy.max_pause_s if failure.reason else min(policy.max_pause_s, _UNANSWERED_PAUSE_S)
        # The exponent is limited, because a float overflows above 2.0 ** 1023.
        own_s = min(longest_s, policy.first_pause_s * 2.0 ** min(self._failures - 1, 64))
        return max(own_s, failure.retry_after_s or 0.0)

    def _is_final(self, failure: CallFailed, now_s: float, has_begun: bool) -> bool:
        policy = self._policy
        is_full = failure.code == "RESOURCE_EXHAUSTED" and failure.retry_after_s is not None
        was_last = not has_begun and policy.max_attempts is not None and self._failures >= policy.max_attempts
        is_over = now_s - self._since_s >= policy.resume_timeout_s
        return was_last or is_over or not (is_full or failure.code == "UNAVAILABLE")


@dataclass(slots=True)
class _Held:
    """The part of a sequence that was received."""

    ids: list[int] = field(default_factory=list)
    has_begun: bool = False
    has_ended: bool = False


class Conversation:
    """A request that is repeated, with the seed of its first answer, until every sequence has ended."""

    def __init__(self, request: pb.GenerateRequest, policy: RetryPolicy) -> None:
        self._request = pb.GenerateRequest()
        self._request.CopyFrom(request)
        self._policy = policy
        if policy.resume:
            self._request.output.token_ids = True
        count = max(1, request.sampling.n)
        indices = [request.resume.index] if request.HasField("resume") else range(count)
        self._held = {index: _Held(list(request.resume.generated_token_ids)) for index in indices}
        self._has_scores = False
        self._retries = Retries(policy)

    def next_request(self) -> pb.GenerateRequest | None:
        """Return the request of the next call; None when every sequence has ended."""
        if not any(held.has_begun for held in self._held.values()):
            return self._request
        index = next((index for index, held in self._held.items() if not held.has_ended), None)
        return None if index is None else self._rest_of(index)

    def record(self, message: pb.GenerateResponse) -> Chunk:
        """Record a message of the answer, and return its chunk."""
        self._retries.progress()
        held = self._held[message.index]
        held.has_begun = True
        self._has_scores |= len(message.prompt_tokens) > 0
        held.has_ended = message.HasField("finish")
        held.ids.extend(token.id for token in message.tokens)
        if message.HasField("seed"):
            self._request.sampling.seed = message.seed
        if not self._request.request_id:
            self._request.request_id = message.request_id
        return read_chunk(message)

    def check_end(self, request: pb.GenerateRequest) -> None:
        """Raise CallFailed if a sequence that `request` asked for has not ended."""
        wanted = [request.resume.index] if request.HasField("resume") else list(self._held)
        if not all(self._held[index].has_ended for index in wanted):
            raise CallFailed("INTERNAL", "the server closed the stream before its end")

    def pause_after(self, failure: CallFailed, now_s: float) -> float:
        """Return the seconds to wait before the next call. Raises `failure` if there is to be none."""
        has_begun = any(held.has_begun for held in self._held.values())
        if has_begun and not self._policy.resume:
            raise failure
        return self._retries.pause_after(failure, now_s, has_begun)

    def _rest_of(self, index: int) -> pb.GenerateRequest:
        held = self._held[index]
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        request.resume.CopyFrom(pb.ResumeFrom(index=index, generated_token_ids=held.ids))
        if held.has_begun:  # the first message held the prompt's text
            request.output.echo = False
        if self._has_scores:
            request.output.ClearField("prompt_logprobs")
        return request
