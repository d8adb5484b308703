"""From deltas to the JSON of completions: whole, or as one event per delta. `chat` makes chats of the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from ppserve.core.request import FinishReason, Request
from ppserve.head.api.call import Call
from ppserve.head.api.http.fields import Body
from ppserve.head.api.http.logprobs import LogprobsJson, LogprobWriter, ScoredToken
from ppserve.head.api.request_handler import RequestHandler
from ppserve.head.api.stream import FINISH_WORDS, Delta, Score

_encode = msgspec.json.Encoder().encode


class CachedTokensJson(msgspec.Struct):
    cached_tokens: int


class UsageJson(msgspec.Struct):
    """Tokens of all prompts, and of all sequences."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokensJson


class ChoiceJson(msgspec.Struct, kw_only=True):
    """One sequence, or what is new of it. stop_reason: the stop string or token that ended it (vLLM's). token_ids,
    prompt_token_ids: only where they were asked for."""

    index: int
    text: str
    logprobs: LogprobsJson | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class AnswerJson(msgspec.Struct):
    """An answer, or one event of it. seed: the one in use. system_fingerprint: see `ModelDescription.fingerprint`.
    prompt_token_ids: of a chat, whose choices have one prompt."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    seed: int
    choices: Sequence[Any]
    usage: UsageJson | UnsetType | None = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class Answers:
    """Makes the answers to one call. requests: one for each of its prompts, in order."""

    objects: ClassVar[tuple[str, str]] = ("text_completion", "text_completion")
    id_prefix: ClassVar[str] = "cmpl-"

    def __init__(
        self, call: Call, body: Body, requests: Sequence[Request], request_handler: RequestHandler
    ) -> None:
        description = request_handler.description
        options = body.get("stream_options", {})
        self._has_usage, self._usage_on_all = options.get("include_usage"), options.get("continuous_usage_stats")
        self._head = (
            self.id_prefix + call.request_id,
            int(time.time()),
            description.name,
            description.fingerprint,
        )
        self._seed = body.get("seed", requests[0].sampling.seed)
        as_ids = body.get("return_tokens_as_token_ids", False)

        def new_writer() -> LogprobWriter:
            return LogprobWriter(request_handler.token_bytes, request_handler.text_bytes, as_ids)

        self._prompts = [PromptProgress(place, request, new_writer) for place, request in enumerate(requests)]

    def whole(self, deltas: Sequence[tuple[int, Delta]]) -> bytes:
        """All sequences as one answer. deltas: one for each of them, with its prompt's place."""
        choices = [self._choice(self._prompts[place], delta, is_whole=True) for place, delta in deltas]
        choices.sort(key=lambda choice: choice.index)
        return _encode(self._record(self.objects[0], choices, self._usage(self._prompts)))

    def event(self, place: int, delta: Delta) -> bytes:
        """What is new of a sequence of the prompt at `place`."""
        prompt = self._prompts[place]
        choice = self._choice(prompt, delta, is_whole=False)
        usage: UsageJson | UnsetType | None = UNSET
        if self._has_usage:
            usage = self._usage([prompt]) if self._usage_on_all else None
        return _encode(self._record(self.objects[1], (choice,), usage))

    def last_event(self) -> bytes | None:
        """The usage of all, where it is asked for."""
        if not self._has_usage:
            return None
        return _encode(self._record(self.objects[1], (), self._usage(self._prompts)))

    def _record(self, kind: str, choices: Sequence[Any], usage: UsageJson | UnsetType | None) -> AnswerJson:
        name, created, model, fingerprint = self._head
        return AnswerJson(name, kind, created, model, fingerprint, self._seed, choices, usage)

    def _choice(self, prompt: PromptProgress, delta: Delta, is_whole: bool) -> Any:
        """One choice of an answer, or of an event."""
        prompt.note(delta)
        return ChoiceJson(
            index=prompt.choice_index(delta),
            text=delta.text,
            logprobs=prompt.completion_logprobs(delta),
            token_ids=prompt.ids(delta),
            prompt_token_ids=prompt.prompt_ids(delta),
            **finish_of(delta),
        )

    def _usage(self, prompts: Sequence[PromptProgress]) -> UsageJson:
        num_prompt = sum(len(prompt.request.prompt_ids) for prompt in prompts)
        num_generated = sum(sum(prompt.num_generated.values()) for prompt in prompts)
        cached = CachedTokensJson(sum(prompt.num_cached for prompt in prompts))
        return UsageJson(num_prompt, num_generated, num_prompt + num_generated, cached)


class PromptProgress:
    """What was seen of one prompt's sequences, and how their tokens are shown. place: among the call's prompts."""

    def __init__(self, place: int, request: Request, new_writer: Callable[[], LogprobWriter]) -> None:
        self.request = request
        self._place = place
        self.num_generated: dict[int, int] = {}
        self.num_cached = 0
        output = request.output
        self.has_scores = output.logprobs is not None
        self._new_writer = new_writer
        self._writers: dict[int, LogprobWriter] = {}
        self._prompt_scores: Sequence[Score] = ()

    def note(self, delta: Delta) -> None:
        self.num_generated[delta.index] = delta.num_generated
        self.num_cached = max(self.num_cached, delta.last.cached_tokens)
        self._prompt_scores = delta.prompt_scores or self._prompt_scores

    def choice_index(self, delta: Delta) -> int:
        return self._place * self.request.num_sequences + delta.index

    def writer(self, index: int) -> LogprobWriter:
        """That of a sequence, which counts its characters."""
        if index not in self._writers:
            self._writers[index] = self._new_writer()
        return self._writers[index]

    def scored_prompt(self, delta: Delta) -> Iterable[ScoredToken]:
        """The prompt's tokens, where they are asked for and come first."""
        scores = self._prompt_scores if delta.is_first else ()
        return zip(self.request.prompt_ids, scores, strict=True) if scores else ()

    def completion_logprobs(self, delta: Delta) -> LogprobsJson | None:
        """As completions show them; None where they are not asked for."""
        if not self.has_scores:
            return None
        return self.writer(delta.index).completion(self.scored_prompt(delta), delta.tokens)

    def ids(self, delta: Delta) -> list[int] | UnsetType:
        return [token_id for token_id, _ in delta.tokens] if self.request.output.token_ids else UNSET

    @property
    def all_prompt_ids(self) -> Sequence[int] | UnsetType:
        return self.request.prompt_ids if self.request.output.token_ids else UNSET

    def prompt_ids(self, delta: Delta) -> Sequence[int] | UnsetType:
        return self.all_prompt_ids if delta.is_first else UNSET


def finish_of(delta: Delta) -> dict[str, Any]:
    """How the sequence ended, if it did, as fields of a choice."""
    reason, matched = delta.last.finish, delta.last.matched
    if reason is None:
        return {"finish_reason": None, "stop_reason": None}
    stop_reason = None if reason is FinishReason.EOS else matched
    return {"finish_reason": FINISH_WORDS[reason], "stop_reason": stop_reason}
