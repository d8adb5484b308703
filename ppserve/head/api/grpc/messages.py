"""Makes a request's options of a message, and messages of its answer. `ppserve.head.api.requests` checks
values."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from ppserve.answers import Chat, Timings
from ppserve.core.request import Request
from ppserve.errors import InvalidRequest, Violation
from ppserve.grammar.structured_output import KINDS, StructuredOutput
from ppserve.head.api.requests import Prompt
from ppserve.head.api.stream import Delta, Score
from ppserve.head.options import GenerationOptions, names_of
from ppserve.tokenizer import Tokenizer
from ppserve.v1 import generation_pb2 as pb


def request_options(message: pb.GenerateRequest) -> tuple[GenerationOptions, Prompt | Chat]:
    """Read the options that the message sets, and its prompt. Empty lists and flags that are false are absent.

    The fields of a part are named as its options are, which `_check_proto` checks.
    """
    parts = message.sampling, message.stop, message.output
    said: dict[str, Any] = {field.name: value for part in parts for field, value in part.ListFields()}
    resume, is_resumed = message.resume, message.HasField("resume")
    options = GenerationOptions(
        **said,
        priority=message.priority - message.urgency,
        structured_output=_form(message.structured_output) if message.HasField("structured_output") else None,
        resume_index=resume.index if is_resumed else None,
        resume_ids=resume.generated_token_ids if is_resumed else None,
    )
    return options, _prompt(message)


def _prompt(message: pb.GenerateRequest) -> Prompt | Chat:
    """Return the prompt of the message; an empty text if it has none."""
    match message.WhichOneof("prompt"):
        case "token_ids":
            return message.token_ids.ids
        case "chat":
            return Chat(tuple((each.role, each.content) for each in message.chat.messages))
        case _:
            return message.text


def _form(message: pb.StructuredOutput) -> StructuredOutput:
    """Make a form of its message. Raises InvalidRequest for a kind that does not exist."""
    kind = next((kind for kind in KINDS if pb.StructuredOutput.Kind.Value(kind.upper()) == message.kind), None)
    if kind is None:
        raise InvalidRequest([Violation("structured_output.kind", f"{message.kind} is no kind of form")])
    return StructuredOutput(kind, message.source)


def _check_proto() -> None:
    """Check that the fields of each part of the proto are the options of that part, no fewer and no more."""
    parts: dict[str, type[Message]] = {
        "sampling": pb.SamplingParams,
        "stop": pb.StopConditions,
        "output": pb.OutputOptions,
    }
    for part, message in parts.items():
        differing = set(message.DESCRIPTOR.fields_by_name) ^ names_of(part)
        assert not differing, f"{sorted(differing)} are in one of the proto's {part} and GenerationOptions"


_check_proto()


def delta_message(delta: Delta, request: Request, public_id: str, tokenizer: Tokenizer) -> pb.GenerateResponse:
    """Make the message of a delta. public_id: the request's id as its caller knows it."""
    output, last = request.output, delta.last
    message = pb.GenerateResponse(
        request_id=public_id,
        index=delta.index,
        first_token=delta.offset,
        num_tokens=len(delta.tokens),
        text=delta.text,
    )
    if output.token_ids or output.logprobs is not None:
        message.tokens.extend([_token(*token, tokenizer) for token in delta.tokens])
    if delta.prompt_tokens:
        message.prompt_tokens.extend([_token(*token, tokenizer) for token in delta.prompt_tokens])
    if delta.is_first or last.finish is not None:
        message.seed = request.sampling.seed
    if last.finish is not None:
        _add_end(message, delta, request)
    return message


def _add_end(message: pb.GenerateResponse, delta: Delta, request: Request) -> None:
    last = delta.last
    message.finish.reason = pb.Finish.Reason.Value(last.finish)  # type: ignore[assignment, arg-type]
    if isinstance(last.matched, str):
        message.finish.stop = last.matched
    elif last.matched is not None:
        message.finish.token_id = last.matched
    message.usage.prompt_tokens = len(request.prompt_ids)
    message.usage.completion_tokens = delta.num_generated
    message.usage.cached_tokens = last.cached_tokens
    if request.output.timings and last.timings is not None:
        message.timings.CopyFrom(timings_message(last.timings))


def timings_message(timings: Timings) -> pb.Timings:
    """Make the message that tells where a sequence's time went."""
    return pb.Timings(
        queue_seconds=timings.queue_s,
        prefill_seconds=timings.prefill_s,
        ttft_seconds=timings.ttft_s,
        decode_seconds=timings.decode_s,
        stage_busy_seconds=timings.stage_busy_s,
    )


def _token(token_id: int, score: Score, tokenizer: Tokenizer) -> pb.TokenInfo:
    token = pb.TokenInfo(id=token_id, bytes=tokenizer.token_bytes(token_id))
    if score is not None:
        token.logprob = score.logprob
        for top_id, logprob in score.top:
            token.top.add(id=top_id, bytes=tokenizer.token_bytes(top_id), logprob=logprob)
    return token
