"""What a caller asks with and what it gets, in the Python client and in `Pipeline` alike: plain, typed values."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any, TypedDict, get_type_hints

Prompt = str | Sequence[int]
"""A text, or token ids."""


class Options(TypedDict, total=False):
    """What a request may say beside its prompt; the proto describes each. What is absent, or None, takes the
    server's default."""

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
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]  # one string or several
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop: bool
    echo: bool
    logprobs: int
    prompt_logprobs: int
    token_ids: bool
    timings: bool
    stream_interval: int
    request_id: str
    priority: int
    timeout_s: float  # for the whole call, retries included


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    bytes: bytes
    logprob: float | None = None  # natural logarithm; None when not asked for
    top: tuple[Token, ...] = ()  # the most likely tokens in its place


@dataclass(frozen=True, slots=True)
class Finish:
    reason: str  # a name of the proto's `Finish.Reason`, such as EOS
    matched: int | str | None = None  # the token or string that ended the sequence, if one did


@dataclass(frozen=True, slots=True)
class Usage:
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
    """Consecutive tokens of one sequence: what is new of a stream, or all of a completed sequence. The last chunk
    of a sequence, and no other, has `finish` and `usage`."""

    request_id: str
    index: int  # of the sequence
    first_token: int  # its offset among the generated tokens
    num_tokens: int  # whether they are listed or not
    text: str
    tokens: tuple[Token, ...] = ()  # when asked for; so are `prompt_tokens`
    prompt_tokens: tuple[Token, ...] = ()
    seed: int | None = None  # the one in use, on the first and the last chunk
    finish: Finish | None = None
    usage: Usage | None = None
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request: a chunk for each of its `n` sequences, in order of their index."""

    request_id: str
    seed: int
    sequences: tuple[Chunk, ...]

    @property
    def text(self) -> str:
        """The first sequence's text."""
        return self.sequences[0].text

    @property
    def finish(self) -> Finish:
        """How the first sequence ended."""
        assert self.sequences[0].finish is not None
        return self.sequences[0].finish


def completion_of(chunks: Sequence[Chunk]) -> Completion:
    """What all chunks of a request make together."""
    by_index: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        by_index.setdefault(chunk.index, []).append(chunk)
    assert chunks[0].seed is not None
    sequences = tuple(_join(by_index[index]) for index in sorted(by_index))
    return Completion(chunks[0].request_id, chunks[0].seed, sequences)


def _join(chunks: Sequence[Chunk]) -> Chunk:
    """All chunks of one sequence as one."""
    return replace(
        chunks[-1],
        first_token=chunks[0].first_token,
        num_tokens=sum(chunk.num_tokens for chunk in chunks),
        text="".join(chunk.text for chunk in chunks),
        tokens=tuple(token for chunk in chunks for token in chunk.tokens),
        prompt_tokens=chunks[0].prompt_tokens,
    )


# ---- reading what was asked -------------------------------------------------------------------------------

_KINDS = get_type_hints(Options)


def read_prompt(given: Any) -> Prompt:
    """A text or token ids, also of a program's arrays. Raises TypeError for anything else."""
    return given if isinstance(given, str) else _read("prompt", given, _ids, "a text or a list of token ids")


def read_options(given: Mapping[str, Any], kinds: Mapping[str, Any] = _KINDS) -> dict[str, Any]:
    """The options that are not None, in Python's own types. kinds: the type of each, by name. Raises TypeError,
    naming an option that does not exist or has another type."""
    if unknown := sorted(given.keys() - kinds.keys()):
        raise TypeError(f"there is no option {unknown[0]!r}")
    told = {name: value for name, value in given.items() if value is not None}
    return {name: _read(name, value, *_READERS[kinds[name]]) for name, value in told.items()}


def _read(name: str, value: Any, reader: Callable[[Any], Any], what: str) -> Any:
    try:
        return reader(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name}: {reprlib.repr(value)} is not {what}") from None


def _whole(value: Any) -> int:
    return int(index(value))  # True is one of Python's whole numbers, and would stay what it is


def _number(value: Any) -> float:
    if isinstance(value, str | bytes) or value != value:
        raise TypeError
    return float(value)


def _flag(value: Any) -> bool:
    if value not in (False, True):
        raise TypeError
    return bool(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _texts(value: Any) -> tuple[str, ...]:
    """One string is not a list of its characters."""
    return (value,) if isinstance(value, str) else tuple(map(_text, value))


def _ids(value: Any) -> tuple[int, ...]:
    """Bytes are refused: they would be read as token ids below 256."""
    if isinstance(value, bytes | bytearray | Mapping):
        raise TypeError
    return tuple(map(_whole, value))


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise TypeError
    return {_whole(token_id): _number(bias) for token_id, bias in value.items()}


_READERS: dict[Any, tuple[Callable[[Any], Any], str]] = {
    int: (_whole, "a whole number"),
    float: (_number, "a number"),
    bool: (_flag, "true or false"),
    str: (_text, "a text"),
    str | Sequence[str]: (_texts, "a text or a list of texts"),
    Sequence[int]: (_ids, "a list of token ids"),
    Mapping[int, float]: (_biases, "numbers by token id"),
}
