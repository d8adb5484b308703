"""What bodies may hold, and what it asks for. Fields that are not named here are ignored, as clients expect; those
that would change the answer, if they were served, are of the type `Unserved` and refused by their names.

Only what has no counterpart in `Asked` is judged here; see `ppserve.head.api.requests`.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, cast

import msgspec

from ppserve.errors import InvalidRequest, Violation
from ppserve.head.api.http.failures import HttpError
from ppserve.head.api.requests import MAX_TOLD, ParsedRequest, Resume
from ppserve.head.limits import MAX_PRIORITY

MAX_PROMPTS = 256
# OpenAI's default for completions; those of a chat may take what is left of the context.
DEFAULT_MAX_TOKENS = 16
# More than any caller means, so that a whole answer is one piece.
_ALL = 2**32 - 1
_TOKEN_ID = re.compile(r"0|-?[1-9][0-9]{0,18}")

Prompt = str | Sequence[int]
# The type of fields that are refused where they ask for something: see `check_served`.
Unserved = Any


class StreamOptions(msgspec.Struct):
    """include_usage: a last event with it. continuous_usage_stats: on every event."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResumeBody(msgspec.Struct, forbid_unknown_fields=True):
    """A sequence whose stream broke: its index, and the token ids of it that the caller holds. Other names are
    refused: an answer that began anew would give the caller its text twice."""

    token_ids: list[int]
    index: int = 0


# What asks for nothing of a field that is not served, where that is not null, false, or an empty text or list.
_NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "function_call": "none",
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "skip_special_tokens": True,
    "tool_choice": "none",
}


class Sampling(msgspec.Struct, kw_only=True):
    """What completions and chats have in common. null is the same as absent."""

    model: str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    priority: int | None = None
    request_id: str | None = None
    resume: ResumeBody | None = None

    allowed_token_ids: Unserved = None
    bad_words: Unserved = None
    best_of: Unserved = None
    guided_choice: Unserved = None
    guided_grammar: Unserved = None
    guided_json: Unserved = None
    guided_regex: Unserved = None
    kv_transfer_params: Unserved = None
    logprob_token_ids: Unserved = None
    logits_processors: Unserved = None
    prompt_logprobs: Unserved = None
    repetition_detection: Unserved = None
    response_format: Unserved = None
    skip_special_tokens: Unserved = None
    structured_outputs: Unserved = None
    truncate_prompt_tokens: Unserved = None
    use_beam_search: Unserved = None
    vllm_xargs: Unserved = None


class CompletionBody(Sampling, kw_only=True):
    """Of /v1/completions. prompt: a text, token ids, or a list of texts or of lists of token ids."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Unserved = None
    prompt_embeds: Unserved = None


_SAME_NAMES = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "n"),
    *("max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "stream_interval"),
)


def check_model(name: str | None, served: str) -> None:
    """Raises HttpError for a model that is not `served`. Who names none means the one that there is."""
    if name is not None and name != served:
        raise HttpError(404, "MODEL_NOT_FOUND", f"this model is not served; {served!r} is", "model")


def check_served(*parts: tuple[str, msgspec.Struct]) -> None:
    """Raises InvalidRequest for fields that are not served and ask for something. parts: of a body, each with what
    stands before the names of its fields."""
    wrong = (
        Violation(f"{place}{name}", "not served")
        for place, part in parts
        for name in _unserved(type(part))
        if _asks_for_something(name, getattr(part, name))
    )
    if told := list(islice(wrong, MAX_TOLD)):
        raise InvalidRequest(told)


@cache
def _unserved(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(kind) if field.type is Unserved)


def _asks_for_something(name: str, value: Any) -> bool:
    if value is None or name in _NEUTRAL:
        return value is not None and value != _NEUTRAL[name]
    return value is not False and value not in ("", [])


def asked_from(body: Sampling, prompt: Prompt, **more: Any) -> ParsedRequest:
    """What the body asks for, from one prompt; `more` as in `Asked`. Raises InvalidRequest."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest([Violation("stream_options", "only with stream")])
    given = {name: getattr(body, name) for name in _SAME_NAMES}
    given["include_stop"] = body.include_stop_str_in_output
    given["token_ids"] = body.return_token_ids
    given["top_k"] = 0 if body.top_k == -1 else body.top_k
    # OpenAI's seeds are signed; ours are the same 64 bits.
    given["seed"] = body.seed + 2**64 if body.seed is not None and -(2**63) <= body.seed < 0 else body.seed
    given["priority"] = None if body.priority is None else _priority_from(body.priority)
    given["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    given["logit_bias"] = None if body.logit_bias is None else _bias_from(body.logit_bias)
    if not body.stream:
        given["stream_interval"] = _ALL
    if body.resume is not None:
        given["resume"] = Resume(body.resume.index, body.resume.token_ids)
    given |= more
    return ParsedRequest(prompt=prompt, **{name: value for name, value in given.items() if value is not None})


def called(names: Mapping[str, str], error: InvalidRequest) -> InvalidRequest:
    """The same mistakes. names: what this body calls fields, where the proto's names do not tell."""
    told = []
    for violation in error.violations:
        name, bracket, rest = violation.field.partition("[")
        told.append(Violation(names.get(name, name) + bracket + rest, violation.problem))
    return InvalidRequest(told)


def completions_from(body: CompletionBody) -> list[ParsedRequest]:
    """What the body asks for, of each of its prompts. Raises InvalidRequest."""
    prompts = _prompts_from(body.prompt)
    check_served(("", body))
    if body.resume is not None and len(prompts) > 1:
        raise InvalidRequest([Violation("resume", "with one prompt only")])
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    scored = body.logprobs if body.echo else None
    more = {"max_tokens": max_tokens, "echo": body.echo, "logprobs": body.logprobs, "prompt_logprobs": scored}
    return [asked_from(body, prompt, **more) for prompt in prompts]


def _prompts_from(given: str | list[str | int | list[int]] | None) -> list[Prompt]:
    if given is None or isinstance(given, str):
        return [given or ""]
    kinds = {type(part) for part in given}
    if len(kinds) > 1:
        raise InvalidRequest([Violation("prompt", "mixes texts, token ids and lists of them")])
    if kinds == {int}:
        return [cast(Sequence[int], given)]
    if not 1 <= len(given) <= MAX_PROMPTS:
        raise InvalidRequest([Violation("prompt", f"{len(given)} prompts; 1 to {MAX_PROMPTS} are allowed")])
    return cast("list[Prompt]", given)


def _priority_from(given: int) -> int:
    """In vLLM's interface the lowest comes first, in ours the highest."""
    if abs(given) > MAX_PRIORITY:
        raise InvalidRequest([Violation("priority", f"{given} is outside {-MAX_PRIORITY} to {MAX_PRIORITY}")])
    return -given


def _bias_from(given: dict[str, float]) -> dict[int, float]:
    if wrong := [name for name in given if not _TOKEN_ID.fullmatch(name)]:
        raise InvalidRequest([Violation("logit_bias", f"{reprlib.repr(wrong[0])} is no token id")])
    return {int(token_id): bias for token_id, bias in given.items()}
