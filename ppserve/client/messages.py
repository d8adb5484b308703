"""Converts between the values of `ppserve.answers` and the messages of the proto."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from ppserve.answers import Chunk, Finish, Prompt, Timings, Token, Usage, read_prompt
from ppserve.v1 import generation_pb2 as pb


def to_message(prompt: Prompt, options: Mapping[str, Any]) -> pb.GenerateRequest:
    """The message that asks for this. options: as `answers.read_options` reads them. Raises ValueError for a value
    that its field cannot hold, TypeError for a prompt that is none."""
    request = pb.GenerateRequest()
    asked = read_prompt(prompt)
    if isinstance(asked, str):
        _fill(request, "text", asked, "prompt")
    else:
        _fill(request.token_ids, "ids", asked, "prompt")
    # The request comes last: its own fields `stop` and `token_ids` are messages, not the options of these names.
    homes = (request.sampling, request.stop, request.output, request)
    for name, value in options.items():
        if name != "timeout_s":
            _fill(next(home for home in homes if name in home.DESCRIPTOR.fields_by_name), name, value, name)
    return request


def _fill(home: Message, field: str, value: Any, name: str) -> None:
    """name: what the caller calls the field."""
    try:
        if isinstance(value, Mapping):
            getattr(home, field).update(value)
        elif isinstance(value, tuple):
            getattr(home, field).extend(value)
        else:
            setattr(home, field, value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def read_chunk(message: pb.GenerateResponse) -> Chunk:
    ended, usage = message.HasField("finish"), message.usage
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
        usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) if ended else None,
        timings=_timings(message.timings) if message.HasField("timings") else None,
    )


def read_tokens(response: pb.TokenizeResponse) -> tuple[Token, ...]:
    return tuple(_token(token) for token in response.tokens)


def _token(token: pb.TokenInfo) -> Token:
    logprob = token.logprob if token.HasField("logprob") else None
    return Token(token.id, token.bytes, logprob, tuple(Token(top.id, top.bytes, top.logprob) for top in token.top))


def _finish(finish: pb.Finish) -> Finish:
    kind = finish.WhichOneof("matched")
    return Finish(pb.Finish.Reason.Name(finish.reason), None if kind is None else getattr(finish, kind))


def _timings(timings: pb.Timings) -> Timings:
    return Timings(
        timings.queue_seconds,
        timings.prefill_seconds,
        timings.ttft_seconds,
        timings.decode_seconds,
        tuple(timings.stage_busy_seconds),
    )
