"""What a caller asks with and what it gets: plain, typed values in place of messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import Any, TypedDict

from google.protobuf.message import Message

from ppserve.v1 import generation_pb2 as pb

Prompt = str | Ids[int]


class Options(TypedDict, total=False):
    """Everything a request may say beside its prompt; docs/api.md describes each. What is absent takes the
    server's default. timeout_s: seconds for the whole call, retries included."""

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
    stop: Ids[str]
    stop_token_ids: Ids[int]
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
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Token:
    """A token. logprob: natural logarithm, None when not asked for. top: the most likely ones instead of it."""

    id: int
    bytes: bytes
    logprob: float | None = None
    top: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """reason: a name of the proto's `Finish.Reason`, such as EOS. matched: the token or string, if any did."""

    reason: str
    matched: int | str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens; cached_tokens are those of the prompt that were found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds; see `Timings` in docs/api.md."""

    queue_s: float
    prefill_s: float
    ttft_s: float
    decode_s: float
    stage_busy_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """News of one sequence. The last one of a sequence, and no other, has `finish` and `usage`.

    first_token: offset of its first token. num_tokens: how many it stands for, listed or not. tokens and
    prompt_tokens: when asked for. seed: the one in use, on the first and the last chunk.
    """

    request_id: str
    index: int
    first_token: int
    num_tokens: int
    text: str
    tokens: tuple[Token, ...] = ()
    prompt_tokens: tuple[Token, ...] = ()
    seed: int | None = None
    finish: Finish | None = None
    usage: Usage | None = None
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class Sequence:
    """One finished sequence."""

    index: int
    text: str
    tokens: tuple[Token, ...]
    prompt_tokens: tuple[Token, ...]
    finish: Finish
    usage: Usage
    timings: Timings | None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request: `n` sequences, in order of their index."""

    request_id: str
    seed: int
    sequences: tuple[Sequence, ...]

    @property
    def text(self) -> str:
        """The first sequence's text."""
        return self.sequences[0].text

    @property
    def finish(self) -> Finish:
        """How the first sequence ended."""
        return self.sequences[0].finish


def request_of(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """The message that asks for this. Raises ValueError for a value that its field cannot hold, and
    TypeError for an option that does not exist."""
    asked: dict[str, Any] = dict(options)
    asked.pop("timeout_s", None)
    request = pb.GenerateRequest()
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    homes = (request.sampling, request.stop, request.output, request)
    for name, value in asked.items():
        home = next((home for home in homes if name in home.DESCRIPTOR.fields_by_name and name in _OPTIONS), None)
        # `stop` is also the name of the message that holds it, as `token_ids` is that of the prompt.
        if home is None:
            raise TypeError(f"there is no option {name!r}")
        try:
            _fill(home, name, value)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return request


def _fill(home: Message, name: str, value: Any) -> None:
    field = getattr(home, name)
    if isinstance(value, Mapping):
        field.update(value)
    elif not isinstance(value, str) and isinstance(value, Iterable):
        field.extend(value)
    else:
        setattr(home, name, value)


_OPTIONS = frozenset(Options.__annotations__)


def chunk_of(message: pb.GenerateResponse) -> Chunk:
    """A message as a chunk."""
    ended = message.HasField("finish")
    return Chunk(
        request_id=message.request_id,
        index=message.index,
        first_token=message.first_token,
        num_tokens=message.num_tokens,
        text=message.text,
        tokens=tuple(_token(token) for token in message.tokens),
        prompt_tokens=tuple(_token(token) for token in message.prompt_tokens),
        seed=message.seed if message.HasField("seed") else None,
        finish=_finish(message.finish) if ended else None,
        usage=_usage(message.usage) if ended else None,
        timings=_timings(message.timings) if message.HasField("timings") else None,
    )


def tokens_of(response: pb.TokenizeResponse) -> tuple[Token, ...]:
    """The tokens of a text."""
    return tuple(_token(token) for token in response.tokens)


def completion_of(chunks: Ids[Chunk]) -> Completion:
    """What all chunks of a request make together."""
    indices = sorted({chunk.index for chunk in chunks})
    seed = next(chunk.seed for chunk in chunks if chunk.seed is not None)
    sequences = tuple(_sequence([chunk for chunk in chunks if chunk.index == index]) for index in indices)
    return Completion(chunks[0].request_id, seed, sequences)


def _sequence(chunks: Ids[Chunk]) -> Sequence:
    last = chunks[-1]
    assert last.finish is not None
    assert last.usage is not None
    return Sequence(
        index=last.index,
        text="".join(chunk.text for chunk in chunks),
        tokens=tuple(token for chunk in chunks for token in chunk.tokens),
        prompt_tokens=chunks[0].prompt_tokens,
        finish=last.finish,
        usage=last.usage,
        timings=last.timings,
    )


def _token(token: pb.TokenInfo) -> Token:
    logprob = token.logprob if token.HasField("logprob") else None
    return Token(token.id, token.bytes, logprob, tuple(Token(top.id, top.bytes, top.logprob) for top in token.top))


def _finish(finish: pb.Finish) -> Finish:
    kind = finish.WhichOneof("matched")
    return Finish(pb.Finish.Reason.Name(finish.reason), None if kind is None else getattr(finish, kind))


def _usage(usage: pb.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)


def _timings(timings: pb.Timings) -> Timings:
    return Timings(
        timings.queue_seconds,
        timings.prefill_seconds,
        timings.ttft_seconds,
        timings.decode_seconds,
        tuple(timings.stage_busy_seconds),
    )
