"""From deltas to the JSON of completions: whole, or as one event per delta. `chat` makes chats of the same.

The fields are OpenAI's, and vLLM's `stop_reason`, `token_ids` and `prompt_token_ids`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import msgspec

from ppserve.core.request import FinishReason, Request
from ppserve.head.api.call import Call
from ppserve.head.api.http.fields import Body
from ppserve.head.api.http.logprobs import LogprobWriter, ScoredToken
from ppserve.head.api.request_handler import RequestHandler
from ppserve.head.api.stream import FINISH_WORDS, Delta, Score

Json = dict[str, Any]

_encode = msgspec.json.Encoder().encode


class Answers:
    """Makes the answers to one call. requests: one for each of its prompts, in order."""

    objects: ClassVar[tuple[str, str]] = ("text_completion", "text_completion")
    id_prefix: ClassVar[str] = "cmpl-"

    def __init__(
        self, call: Call, body: Body, requests: Sequence[Request], request_handler: RequestHandler
    ) -> None:
        options = body.get("stream_options", {})
        self._has_usage, self._usage_on_all = options.get("include_usage"), options.get("continuous_usage_stats")
        self._head = {
            "id": self.id_prefix + call.request_id,
            "created": int(time.time()),
            "model": request_handler.description.name,
            "system_fingerprint": request_handler.description.fingerprint,
            "seed": body.get("seed", requests[0].sampling.seed),
        }
        as_ids = body.get("return_tokens_as_token_ids", False)

        def new_writer() -> LogprobWriter:
            return LogprobWriter(request_handler.token_bytes, request_handler.text_bytes, as_ids)

        self._prompts = [PromptProgress(place, request, new_writer) for place, request in enumerate(requests)]

    def whole(self, deltas: Sequence[tuple[int, Delta]]) -> bytes:
        """All sequences as one answer. deltas: one for each of them, with its prompt's place."""
        choices = [self._choice(self._prompts[place], delta, is_whole=True) for place, delta in deltas]
        choices.sort(key=lambda choice: choice["index"])
        return _encode(self._record(self.objects[0], choices, usage=_usage(self._prompts)))

    def event(self, place: int, delta: Delta) -> bytes:
        """What is new of a sequence of the prompt at `place`."""
        prompt = self._prompts[place]
        choice = self._choice(prompt, delta, is_whole=False)
        if not self._has_usage:
            return _encode(self._record(self.objects[1], (choice,)))
        usage = _usage([prompt]) if self._usage_on_all else None
        return _encode(self._record(self.objects[1], (choice,), usage=usage))

    def last_event(self) -> bytes | None:
        """The usage of all, where it is asked for."""
        if not self._has_usage:
            return None
        return _encode(self._record(self.objects[1], (), usage=_usage(self._prompts)))

    def _record(self, kind: str, choices: Sequence[Json], **more: Any) -> Json:
        return {**self._head, "object": kind, "choices": choices, **more}

    def _choice(self, prompt: PromptProgress, delta: Delta, is_whole: bool) -> Json:
        """One choice of an answer, or of an event."""
        choice = {**prompt.choice(delta), "text": delta.text, "logprobs": None}
        if prompt.has_scores:
            choice["logprobs"] = prompt.writers[delta.index].completion(prompt.scored_prompt(delta), delta.tokens)
        if prompt.has_ids and delta.is_first:
            choice["prompt_token_ids"] = prompt.request.prompt_ids
        return choice


class PromptProgress:
    """What was seen of one prompt's sequences. place: among the call's prompts."""

    def __init__(self, place: int, request: Request, new_writer: Callable[[], LogprobWriter]) -> None:
        self.request = request
        self.has_scores, self.has_ids = request.output.logprobs is not None, request.output.token_ids
        self.writers = defaultdict[int, LogprobWriter](new_writer)
        """By sequence: each counts its characters."""
        self.num_generated: dict[int, int] = {}
        self.num_cached = 0
        self._place = place
        self._prompt_scores: Sequence[Score] = ()

    def choice(self, delta: Delta) -> Json:
        """The fields that completions and chats have in common. Call it once for each delta, in order."""
        self.num_generated[delta.index] = delta.num_generated
        self.num_cached = max(self.num_cached, delta.last.cached_tokens)
        self._prompt_scores = delta.prompt_scores or self._prompt_scores
        reason, matched = delta.last.finish, delta.last.matched
        choice: Json = {
            "index": self._place * self.request.num_sequences + delta.index,
            "finish_reason": None if reason is None else FINISH_WORDS[reason],
            "stop_reason": None if reason in (None, FinishReason.EOS) else matched,
        }
        if self.has_ids:
            choice["token_ids"] = [token_id for token_id, _ in delta.tokens]
        return choice

    def scored_prompt(self, delta: Delta) -> Iterable[ScoredToken]:
        """The prompt's tokens, where they are asked for and come first."""
        scores = self._prompt_scores if delta.is_first else ()
        return zip(self.request.prompt_ids, scores, strict=True) if scores else ()


def _usage(prompts: Sequence[PromptProgress]) -> Json:
    """Tokens of all prompts, and of all their sequences."""
    num_prompt = sum(len(prompt.request.prompt_ids) for prompt in prompts)
    num_generated = sum(sum(prompt.num_generated.values()) for prompt in prompts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": sum(prompt.num_cached for prompt in prompts)},
    }
