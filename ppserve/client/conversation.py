"""One request until it is answered, over as many calls as that takes. Pure: no sockets, no clock, no sleep.

The two clients drive it: send `next_request`, hand every message to `take`, report how the call ended.
What was received is sent back when a stream broke, and the server goes on from there (`ResumeFrom`). Text
may lag behind tokens, but tokens and the text they completed always come in the same message; so the tokens
held say exactly which text is held, and nothing is lost or repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ppserve.answers import Chunk
from ppserve.client.failures import CallFailed
from ppserve.client.messages import chunk_of
from ppserve.v1 import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often to try before giving up, and how long to wait in between (seconds, doubling).

    max_attempts: calls in a row that bring nothing new. resume: whether to continue a stream that broke;
    costs a few bytes per token, for the tokens' ids. on_retry: told of every failure that is not the last.
    """

    max_attempts: int = 8
    first_pause_s: float = 0.1
    max_pause_s: float = 5.0
    resume: bool = True
    on_retry: Callable[[CallFailed], None] | None = None


class Retries:
    """Counts failures in a row, and remembers what they began with."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._failures = 0
        self._first: CallFailed | None = None

    def progress(self) -> None:
        """Something came: what failed before does not count any more."""
        self._failures = 0
        self._first = None

    def pause_after(self, failure: CallFailed) -> float:
        """Seconds to wait before trying again: at least what the server asks for. Raises `failure`, with what it
        began with, when it is no use (only nobody there, or a queue that says when it has room, pass with time)
        or was tried enough."""
        self._failures += 1
        first = self._first
        if first is None or (failure.reason and not first.reason):
            self._first = failure  # what a server says tells more than that none is there
        is_full = failure.code == "RESOURCE_EXHAUSTED" and failure.retry_after_s is not None
        if self._failures >= self._policy.max_attempts or not (is_full or failure.code == "UNAVAILABLE"):
            raise failure if first is None or str(first) == str(failure) else failure.after(first)
        if self._policy.on_retry is not None:
            self._policy.on_retry(failure)
        own_s = min(self._policy.max_pause_s, self._policy.first_pause_s * 2.0 ** (self._failures - 1))
        return max(own_s, failure.retry_after_s or 0.0)


@dataclass(slots=True)
class _Held:
    """What was received of one sequence."""

    ids: list[int] = field(default_factory=list)
    has_begun: bool = False
    has_ended: bool = False


class Conversation:
    """Asks for `request` until every sequence has ended. The seed of the first message fixes the rest."""

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
        """What to send now; None when everything was received."""
        if not any(held.has_begun for held in self._held.values()):
            return self._request
        index = next((index for index, held in self._held.items() if not held.has_ended), None)
        return None if index is None else self._rest_of(index)

    def take(self, message: pb.GenerateResponse) -> Chunk:
        """Remember what came."""
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
        return chunk_of(message)

    def check_end(self, request: pb.GenerateRequest) -> None:
        """The call for `request` ended well. Raises CallFailed if it left sequences without an end."""
        wanted = [request.resume.index] if request.HasField("resume") else list(self._held)
        if not all(self._held[index].has_ended for index in wanted):
            raise CallFailed("INTERNAL", "the server closed the stream before its end")

    def pause_after(self, failure: CallFailed) -> float:
        """Seconds to wait before the next call. Raises `failure` when there is to be none."""
        if not self._policy.resume and any(held.has_begun for held in self._held.values()):
            raise failure
        return self._retries.pause_after(failure)

    def _rest_of(self, index: int) -> pb.GenerateRequest:
        held = self._held[index]
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        request.resume.index = index
        del request.resume.generated_token_ids[:]
        request.resume.generated_token_ids.extend(held.ids)
        if held.has_begun:  # the prompt's text came with the first message
            request.output.echo = False
        if self._has_scores:
            request.output.ClearField("prompt_logprobs")
        return request
