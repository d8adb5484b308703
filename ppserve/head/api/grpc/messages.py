"""Make plain values of messages, and messages of values. Judges nothing; `ppserve.head.api.requests` does."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message

from ppserve.core.request import Request
from ppserve.head.api.requests import Prompt
from ppserve.head.api.stream import Delta, Score
from ppserve.head.descriptions import ModelDescription, StageDescription, Topology
from ppserve.head.options import GenerationOptions, names_of
from ppserve.tokenizer import Tokenizer
from ppserve.v1 import generation_pb2 as pb

M = TypeVar("M", bound=Message)


def request_options(message: pb.GenerateRequest) -> tuple[GenerationOptions, Prompt]:
    """The options that the message sets, each under its own name; and its prompt."""
    given: dict[str, Any] = {"priority": message.priority - message.urgency}
    for part in (message.sampling, message.stop, message.output):
        given |= {field.name: value for field, value in part.ListFields()}
    if message.HasField("resume"):
        resume = message.resume
        given |= {"resume_index": resume.index, "resume_ids": resume.generated_token_ids}
    prompt = message.token_ids.ids if message.WhichOneof("prompt") == "token_ids" else message.text
    return GenerationOptions(**given), prompt


def _check_proto() -> None:
    """The proto's fields are the options of the same part, no fewer and no more."""
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
    """public_id: the request's id as its caller knows it."""
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
        message.timings.CopyFrom(_copied(pb.Timings, last.timings))


def _token(token_id: int, score: Score, tokenizer: Tokenizer) -> pb.TokenInfo:
    token = pb.TokenInfo(id=token_id, bytes=tokenizer.token_bytes(token_id))
    if score is not None:
        token.logprob = score.logprob
        for top_id, logprob in score.top:
            token.top.add(id=top_id, bytes=tokenizer.token_bytes(top_id), logprob=logprob)
    return token


def model_message(description: ModelDescription) -> pb.GetModelInfoResponse:
    """GetModelInfo's answer."""
    arch, max_context = description.architecture, description.max_context
    sizes = {name: getattr(arch, name) for name in ("num_layers", "num_heads", "inner_width")}
    sizes["num_parameters"] = description.num_parameters
    return _copied(
        pb.GetModelInfoResponse,
        description,
        model=description.name,
        architecture=_copied(pb.Architecture, arch, **sizes),
        eos_token_id=arch.eos_id,
        eos_token_ids=arch.eos_ids,
        limits=_copied(pb.Limits, description.limits, max_prompt_tokens=max_context),
        nondeterministic_reason=description.nondeterministic_reason or "",
    )


def topology_message(topology: Topology) -> pb.GetTopologyResponse:
    """GetTopology's answer."""
    replicas = [_copied(pb.Replica, replica) for replica in topology.replicas]
    stages = list(map(_stage_message, topology.stages))
    return _copied(pb.GetTopologyResponse, topology, stages=stages, replicas=replicas)


def _stage_message(stage: StageDescription) -> pb.Stage:
    ranks = [_copied(pb.StageRank, rank) for rank in stage.ranks]
    return _copied(pb.Stage, stage, bubble_seconds=dict(stage.bubble_s), ranks=ranks)


def _copied(kind: type[M], record: Any, **others: Any) -> M:
    """`others` and the record's fields that the message has, with units written out."""
    named = {re.sub("_s$", "_seconds", field.name): getattr(record, field.name) for field in fields(record)}
    known = kind.DESCRIPTOR.fields_by_name
    return kind(**{name: value for name, value in named.items() if name in known} | others)
