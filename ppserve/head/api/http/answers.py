"""Makes the JSON of completions from deltas, whole or as an event for each delta. `chat` builds on it.

The fields are OpenAI's, and vLLM's `stop_reason`, `token_ids` and `prompt_token_ids`.
"""

from __future__ import annotations

import codecs
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import c_float
from functools import partial
from itertools import groupby, islice
from typing import Any, ClassVar

from msgspec.structs import replace

from ppserve.core.plan import TokenLogprobs
from ppserve.core.request import FinishReason, Request
from ppserve.errors import RequestError
from ppserve.head.api.call import Call
from ppserve.head.api.http.asked import StreamOptions
from ppserve.head.api.http.bodies import ChoicesBody, GenerationBody
from ppserve.head.api.http.responses import encode, error_json, event
from ppserve.head.api.request_handler import RequestHandler
from ppserve.head.api.stream import FINISH_WORDS, Delta, Score, ScoredToken
from ppserve.head.limits import ALL
from ppserve.tokenizer import Tokenizer

# JSON has no infinity, and this is what vLLM writes instead.
_MIN_LOGPROB = -9999.0

Json = dict[str, Any]


class Answers(ABC):
    """Writes the answers to one call in the form of one path: whole, or as server-sent events."""

    @abstractmethod
    def __init__(
        self, call: Call, body: GenerationBody, requests: Sequence[Request], handler: RequestHandler
    ) -> None:
        """Request: one for each prompt, in order."""

    @abstractmethod
    def whole(self, deltas: Sequence[tuple[int, Delta]]) -> bytes:
        """Write all sequences as one answer. deltas: one for each, with its prompt's place."""

    def opening(self, first: Delta) -> Iterator[bytes]:
        """Yield the events before those of the first delta."""
        return iter(())

    @abstractmethod
    def events(self, place: int, delta: Delta) -> Iterator[bytes]:
        """Yield the events of what is new of a sequence of the prompt at `place`."""

    def ending(self) -> Iterator[bytes]:
        """Yield the events behind those of the last delta."""
        return iter(())

    @abstractmethod
    def failing(self, error: RequestError) -> Iterator[bytes]:
        """Yield the events that end a stream with an error."""


class ChoiceAnswers(Answers):
    """The answers to completions, as OpenAI's choices."""

    objects: ClassVar[tuple[str, str]] = ("text_completion", "text_completion")
    id_prefix: ClassVar[str] = "cmpl-"

    def __init__(
        self, call: Call, body: ChoicesBody, requests: Sequence[Request], handler: RequestHandler
    ) -> None:
        self._options = body.stream_options or StreamOptions()
        self._head = {
            "id": self.id_prefix + call.request_id,
            "created": int(time.time()),
            "model": handler.description.name,
            "system_fingerprint": handler.description.fingerprint,
            "seed": shown_seed(body, requests[0]),
        }
        as_ids, skips_special = bool(body.return_tokens_as_token_ids), requests[0].output.skip_special_tokens
        new_writer = partial(LogprobWriter, handler.tokenizer, as_ids, skips_special)
        self._prompts = [PromptProgress(place, request, new_writer) for place, request in enumerate(requests)]
        self._num_chosen = (body.n or 1) if body.chooses else None
        self._num_top = body.num_top
        self._num_prompt_top = body.prompt_logprobs

    def whole(self, deltas: Sequence[tuple[int, Delta]]) -> bytes:
        choices = [self._choice(self._prompts[place], delta, is_whole=True) for place, delta in deltas]
        if self._num_chosen is not None:
            choices = _likeliest(deltas, choices, self._num_chosen)
        return encode(self._record(self.objects[0], choices, usage=_usage(self._prompts)))

    def events(self, place: int, delta: Delta) -> Iterator[bytes]:
        prompt = self._prompts[place]
        yield self._event(prompt, self._choice(prompt, delta, is_whole=False))

    def ending(self) -> Iterator[bytes]:
        if self._options.include_usage:
            yield event(encode(self._record(self.objects[1], (), usage=_usage(self._prompts))))
        yield event(b"[DONE]")

    def failing(self, error: RequestError) -> Iterator[bytes]:
        yield event(error_json(error))
        yield event(b"[DONE]")

    def _event(self, prompt: PromptProgress, choice: Json) -> bytes:
        more = {}
        if self._options.include_usage:
            more["usage"] = _usage([prompt]) if self._options.continuous_usage_stats else None
        return event(encode(self._record(self.objects[1], (choice,), **more)))

    def _record(self, kind: str, choices: Sequence[Json], **more: Any) -> Json:
        return {**self._head, "object": kind, "choices": choices, **more}

    def _choice(self, prompt: PromptProgress, delta: Delta, is_whole: bool) -> Json:
        choice = {**prompt.choice(delta), "text": delta.text, "logprobs": None}
        if self._num_top is not None:
            echoed = prompt.prompt_tokens if delta.is_first and prompt.request.output.echo else ()
            writer = prompt.writers[delta.index]
            choice["logprobs"] = writer.completion(cut(echoed, self._num_top), delta.tokens)
        if self._num_prompt_top is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(prompt)
        if prompt.has_ids and delta.is_first:
            choice["prompt_token_ids"] = prompt.request.prompt_ids
        return choice

    def _prompt_logprobs(self, prompt: PromptProgress) -> list[Json | None]:
        """Return the prompt's tokens with their log-probabilities, as vLLM's field `prompt_logprobs` has them."""
        assert self._num_prompt_top is not None
        return prompt.new_writer().prompt(cut(prompt.prompt_tokens, self._num_prompt_top))


def _likeliest(deltas: Sequence[tuple[int, Delta]], choices: Sequence[Json], num_chosen: int) -> list[Json]:
    """Return the `num_chosen` likeliest choices of each prompt, the likeliest first. The mean log-probability of
    its tokens says how likely a choice is."""

    def unlikeliness(delta: Delta) -> float:
        logprobs = [score.logprob for _, score in delta.tokens if score is not None]
        return -sum(logprobs) / max(1, len(logprobs))

    ranked = sorted(zip(deltas, choices, strict=True), key=lambda pair: (pair[0][0], unlikeliness(pair[0][1])))
    chosen = []
    for place, of_prompt in groupby(ranked, key=lambda pair: pair[0][0]):
        for rank, (_, choice) in enumerate(islice(of_prompt, num_chosen)):
            chosen.append(choice | {"index": place * num_chosen + rank})
    return chosen


def cut(scored: Iterable[ScoredToken], num_top: int) -> Iterator[ScoredToken]:
    """Yield the tokens, each with at most `num_top` likely ones; ALL keeps all that there are."""
    for token_id, score in scored:
        few = score is not None and num_top != ALL
        yield token_id, replace(score, top=score.top[:num_top]) if few and score is not None else score


def shown_seed(body: GenerationBody, request: Request) -> int:
    """Return the seed in use, in the form in which the caller may send it again."""
    return request.sampling.seed if body.seed is None else body.seed


class PromptProgress:
    """Keeps what answers need of the earlier deltas of one prompt. place: the prompt's place in the call."""

    def __init__(self, place: int, request: Request, new_writer: Callable[[], LogprobWriter]) -> None:
        self.request = request
        self.new_writer = new_writer
        self.has_ids = request.output.token_ids
        self.writers = defaultdict[int, LogprobWriter](new_writer)
        """The writers of sequences, by index. Each counts its own characters."""
        self.newest: dict[int, Delta] = {}
        self._place = place
        self.prompt_tokens: Sequence[ScoredToken] = ()
        """The prompt's tokens, if their scores are asked for; none before its first delta."""

    def choice(self, delta: Delta) -> Json:
        """Return the fields that completions and chats share. It is called once for each delta, in order."""
        self.newest[delta.index] = delta
        self.prompt_tokens = delta.prompt_tokens or self.prompt_tokens
        reason, matched = delta.last.finish, delta.last.matched
        choice: Json = {
            "index": self._place * self.request.num_sequences + delta.index,
            "finish_reason": None if reason is None else FINISH_WORDS[reason],
            "stop_reason": None if reason in (None, FinishReason.EOS) else matched,
        }
        if self.has_ids:
            choice["token_ids"] = [token_id for token_id, _ in delta.tokens]
        return choice


def _usage(prompts: Sequence[PromptProgress]) -> Json:
    num_prompt = sum(len(prompt.request.prompt_ids) for prompt in prompts)
    num_generated = sum(delta.num_generated for prompt in prompts for delta in prompt.newest.values())
    cached = (max([delta.last.cached_tokens for delta in prompt.newest.values()], default=0) for prompt in prompts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": sum(cached)},
    }


class LogprobWriter:
    """One sequence's log-probabilities as JSON, from its first token on.

    as_ids: whether tokens are named `token_id:N` (vLLM's `return_tokens_as_token_ids`).
    skips_special: whether the text is without the names of special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, as_ids: bool, skips_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._bytes_of = tokenizer.text_bytes if skips_special else tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def completion(self, prompt: Iterable[ScoredToken], generated: Iterable[ScoredToken]) -> dict[str, list[Any]]:
        """Return the next tokens as completions show them: four lists, each with an entry for every token.

        prompt: the prompt's tokens, which come first; empty if they are not shown. `text_offset` counts the
        characters before a token; no character spans prompt and answer.
        """
        entries = [self._completed(*token) for token in prompt]
        self._offset += len(self._decoder.decode(b"", final=True)) if entries else 0
        entries += [self._completed(*token) for token in generated]
        lists = "tokens", "token_logprobs", "top_logprobs", "text_offset"
        return {name: [entry[name] for entry in entries] for name in lists}

    def _completed(self, token_id: int, score: Score) -> Json:
        """Return a token's value in each of the lists."""
        name, offset = self._name(token_id), self._offset
        self._offset += len(self._decoder.decode(self._bytes_of(token_id)))
        return {
            "tokens": name,
            "token_logprobs": None if score is None else _finite(score.logprob),
            "top_logprobs": None if score is None else self._top(name, score),
            "text_offset": offset,
        }

    def _top(self, name: str, score: TokenLogprobs) -> dict[str, float]:
        """Return the likely tokens by their names, the likeliest first, which keeps a name that two tokens
        have."""
        top: dict[str, float] = {}
        for token_id, logprob in score.top:
            top.setdefault(self._name(token_id), _finite(logprob))
        top.setdefault(name, _finite(score.logprob))
        return top

    def prompt(self, scored: Iterable[ScoredToken]) -> list[Json | None]:
        """Return a prompt's tokens as vLLM shows them: the token by its id, and then the likely ones by theirs.

        A token that is not among the likely ones has no rank. The first of the prompt has no probability: null.
        """
        return [None if score is None else self._ranked(token_id, score) for token_id, score in scored]

    def _ranked(self, token_id: int, score: TokenLogprobs) -> Json:
        ranks = {top_id: rank for rank, (top_id, _) in enumerate(score.top, 1)}
        logprobs = {token_id: score.logprob} | dict(score.top)
        return {
            str(each): {"logprob": _finite(logprob), "rank": ranks.get(each), "decoded_token": self._name(each)}
            for each, logprob in logprobs.items()
        }

    def chat(self, scored: Iterable[ScoredToken]) -> dict[str, list[Any]]:
        """Return the sequence's next tokens, as chats show them."""
        entries = []
        for token_id, score in scored:
            assert score is not None, "only the first token of a prompt has no score"
            top = [self._entry(top_id, top_logprob) for top_id, top_logprob in score.top]
            entries.append({**self._entry(token_id, score.logprob), "top_logprobs": top})
        return {"content": entries}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        content = list(self._tokenizer.token_bytes(token_id))
        return {"token": self._name(token_id), "logprob": _finite(logprob), "bytes": content}

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else token_name(self._tokenizer.token_bytes(token_id))


def token_name(content: bytes) -> str:
    r"""Return a token as text. Incomplete characters are written as `bytes:\xe2\x80`, OpenAI's way."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _finite(logprob: float) -> float:
    """Return the log-probability as gRPC carries it (float32), never an infinity."""
    return max(c_float(logprob).value, _MIN_LOGPROB)
