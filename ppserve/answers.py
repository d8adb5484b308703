"""The types of what a caller asks and gets, for the Python client and for `Pipeline`."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, get_type_hints

import msgspec

from ppserve.errors import did_you_mean
from ppserve.grammar.structured_output import StructuredOutput

Prompt = str | Sequence[int]
"""A prompt is a text or token ids."""
PromptOrChat = Prompt | Sequence[Mapping[str, str]]
"""A prompt, or the messages of a chat, from which the model's chat template makes the prompt. Each message has a
`role`, such as system, user or assistant, and a `content`."""
Texts = str | Sequence[str]
"""One string or several."""


class Options(TypedDict, total=False):
    """The options of a request, which the proto describes. An option that is absent or None has the server's
    default."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int
    n: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Texts
    max_tokens: int
    min_tokens: int
    stop: Texts
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop: bool
    echo: bool
    logprobs: int
    prompt_logprobs: int
    token_ids: bool
    timings: bool
    stream_interval: int
    skip_special_tokens: bool
    structured_output: StructuredOutput
    request_id: str
    priority: int
    timeout_s: float  # for the whole call, retries included


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a prompt or an answer."""

    id: int
    bytes: bytes
    logprob: float | None = None  # the natural logarithm of its probability; None if it was not asked for
    top: tuple[Token, ...] = ()  # the most likely tokens at its position


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended."""

    reason: str  # a name of the proto's `Finish.Reason`, such as EOS
    matched: int | str | None = None  # the token or string that ended the sequence, if one did


@dataclass(frozen=True, slots=True)
class Usage:
    """The number of tokens that a sequence has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # those of the prompt that were found in the prefix cache


@dataclass(frozen=True, slots=True)
class Timings:
    """See `Timings` in the proto."""

    queue_s: float
    prefill_s: float
    ttft_s: float
    decode_s: float
    stage_busy_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence: the new ones of a stream, or all of a completed sequence. Only the last
    chunk of a sequence has `finish` and `usage`."""

    request_id: str
    index: int  # the number of the sequence, from 0
    first_token: int  # the number of its first token among the generated ones, from 0
    num_tokens: int  # how many tokens it has, whether `tokens` lists them or not
    text: str
    tokens: tuple[Token, ...] = ()  # empty unless the caller asked for tokens; so is `prompt_tokens`
    prompt_tokens: tuple[Token, ...] = ()
    seed: int | None = None  # the seed of the request; only the first and the last chunk have it
    finish: Finish | None = None
    usage: Usage | None = None
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request: a chunk for each of its `n` sequences, in the order of their indices."""

    request_id: str
    seed: int
    sequences: tuple[Chunk, ...]

    @property
    def text(self) -> str:
        """The text of the first sequence."""
        return self.sequences[0].text

    @property
    def finish(self) -> Finish:
        """How the first sequence ended."""
        assert self.sequences[0].finish is not None
        return self.sequences[0].finish


def completion_of(chunks: Sequence[Chunk]) -> Completion:
    """Return the completion that all chunks of a request make together. The chunks of each sequence are in order;
    those of several sequences may be mixed."""
    by_index: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        by_index.setdefault(chunk.index, []).append(chunk)
    assert chunks[0].seed is not None
    sequences = tuple(_join(by_index[index]) for index in sorted(by_index))
    return Completion(chunks[0].request_id, chunks[0].seed, sequences)


def _join(chunks: Sequence[Chunk]) -> Chunk:
    """Join all chunks of one sequence to one."""
    return replace(
        chunks[-1],
        first_token=chunks[0].first_token,
        num_tokens=sum(chunk.num_tokens for chunk in chunks),
        text="".join(chunk.text for chunk in chunks),
        tokens=tuple(token for chunk in chunks for token in chunk.tokens),
        prompt_tokens=chunks[0].prompt_tokens,
    )


# ---- reading what was asked ----

_KINDS = get_type_hints(Options)


class _RoleAndContent(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt that consists of messages: role and content of each."""

    messages: tuple[tuple[str, str], ...]


ReadPrompt = str | tuple[int, ...] | Chat
"""A prompt in Python's own types."""


def read_prompt(given: Any) -> ReadPrompt:
    """Return a prompt in Python's own types. Token ids may be an array. Raises TypeError for other types."""
    if is_chat(given):
        messages = _read("prompt", given, list[_RoleAndContent])
        return Chat(tuple((each.role, each.content) for each in messages))
    if isinstance(given, list | tuple) and any(isinstance(each, str) for each in given):
        problem = "a list holds token ids, or the messages of a chat; each text is a prompt of its own"
        raise TypeError(f"prompt: {reprlib.repr(given)}: {problem}")
    prompt: ReadPrompt = _read("prompt", given, str | Sequence[int])
    return prompt


def is_chat(given: Any) -> bool:
    """Return whether a value is meant to be the messages of a chat."""
    return isinstance(given, list | tuple) and any(isinstance(each, Mapping) for each in given)


def read_options(given: Mapping[str, Any], kinds: Mapping[str, Any] = _KINDS) -> dict[str, Any]:
    """Return the options that are not None, in Python's own types. kinds: the type of each option, by name.
    Raises TypeError that names an option which does not exist or has another type."""
    if unknown := sorted(given.keys() - kinds.keys()):
        raise TypeError(f"there is no option {unknown[0]!r}{did_you_mean(unknown[0], sorted(kinds))}")
    return {name: _read(name, value, kinds[name]) for name, value in given.items() if value is not None}


def _read(name: str, value: Any, kind: Any) -> Any:
    if kind == Texts and isinstance(value, str):
        return (value,)
    try:
        # Bytes are not converted, so they are refused: otherwise they would be read as token ids below 256.
        plain = msgspec.to_builtins(value, builtin_types=(bytes, bytearray), enc_hook=_as_builtin)
        read = msgspec.convert(plain, kind)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: {reprlib.repr(value)}: {error}") from None
    if read != read:
        raise TypeError(f"{name}: nan is not a number")
    return tuple(read) if isinstance(read, list) else read


def _as_builtin(value: Any) -> Any:
    """Convert numbers and arrays of numpy and torch, and other collections."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else list(value)
