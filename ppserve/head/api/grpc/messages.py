"""From messages to plain values, and back. Nothing is judged here; see `ppserve.head.api.requests`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from ppserve.core.request import FinishReason, Request
from ppserve.head.api.stream import Delta, Score
from ppserve.head.descriptions import (
    ModelDescription,
    RankDescription,
    ReplicaDescription,
    StageDescription,
    Topology,
)
from ppserve.head.engine.output import TimingsOutput
from ppserve.head.limits import Limits
from ppserve.v1 import generation_pb2 as pb

REASONS = {reason: pb.Finish.Reason.Value(reason.value) for reason in FinishReason}
_SHAPE = ("num_layers", "width", "num_heads", "inner_width", "vocab_size", "max_positions")


def request_fields(message: pb.GenerateRequest) -> tuple[dict[str, Any], str | Sequence[int]]:
    """What the message asks for: every field that it sets, under its own name; and its prompt."""
    given: dict[str, Any] = {"priority": message.priority}
    for part in (message.sampling, message.stop, message.output):
        given |= {field.name: value for field, value in part.ListFields()}
    if message.HasField("resume"):
        resume = message.resume
        given |= {"resume_index": resume.index, "resume_ids": resume.generated_token_ids}
    return given, message.text if message.WhichOneof("prompt") == "text" else message.token_ids.ids


class GenerateMessages:
    """Makes the messages of one request, by what it asked for.

    public_id: the request's id as its caller knows it. token_bytes: the bytes of a token.
    """

    def __init__(self, request: Request, public_id: str, token_bytes: Callable[[int], bytes]) -> None:
        self._request = request
        self._public_id = public_id
        self._token_bytes = token_bytes
        self._lists_tokens = request.output.token_ids or request.output.logprobs is not None

    def message(self, delta: Delta) -> pb.GenerateResponse:
        """One message for one delta."""
        message = pb.GenerateResponse(
            request_id=self._public_id,
            index=delta.index,
            first_token=delta.offset,
            num_tokens=len(delta.tokens),
            text=delta.text,
        )
        if self._lists_tokens:
            for token_id, score in delta.tokens:
                message.tokens.append(self._token(token_id, score))
        if delta.prompt_scores:
            for token_id, score in zip(self._request.prompt_ids, delta.prompt_scores, strict=True):
                message.prompt_tokens.append(self._token(token_id, score))
        finish = delta.last.finish
        if delta.is_first or finish is not None:
            message.seed = self._request.sampling.seed
        if finish is not None:
            self._add_end(message, delta, finish)
        return message

    def _add_end(self, message: pb.GenerateResponse, delta: Delta, reason: FinishReason) -> None:
        last = delta.last
        message.finish.reason = REASONS[reason]  # type: ignore[assignment]
        if isinstance(last.matched, str):
            message.finish.stop = last.matched
        elif last.matched is not None:
            message.finish.token_id = last.matched
        message.usage.prompt_tokens = len(self._request.prompt_ids)
        message.usage.completion_tokens = delta.num_generated
        message.usage.cached_tokens = last.cached_tokens
        if self._request.output.timings and last.timings is not None:
            message.timings.CopyFrom(pb.Timings(**_fields(last.timings)))

    def _token(self, token_id: int, score: Score) -> pb.TokenInfo:
        token = pb.TokenInfo(id=token_id, bytes=self._token_bytes(token_id))
        if score is not None:
            token.logprob = score.logprob
            for top_id, logprob in score.top:
                token.top.add(id=top_id, bytes=self._token_bytes(top_id), logprob=logprob)
        return token


def model_message(description: ModelDescription) -> pb.GetModelInfoResponse:
    """GetModelInfo's answer."""
    arch = description.architecture
    return pb.GetModelInfoResponse(
        model=description.name,
        architecture=pb.Architecture(
            **{name: getattr(arch, name) for name in _SHAPE}, num_parameters=description.num_parameters
        ),
        dtype=description.dtype,
        quantization=description.quantization,
        max_context=description.max_context,
        eos_token_id=description.eos_id,
        has_tokenizer=description.has_tokenizer,
        limits=pb.Limits(**_fields(description.limits), max_prompt_tokens=description.max_context),
        deterministic=description.deterministic,
        nondeterministic_reason=description.why_not,
        kernels=description.kernels,
        kv_dtype=description.kv_dtype,
        version=description.version,
    )


def topology_message(topology: Topology) -> pb.GetTopologyResponse:
    """GetTopology's answer."""
    return pb.GetTopologyResponse(
        stages=list(map(_stage_message, topology.stages)),
        transport=topology.transport,
        epoch=topology.epoch,
        microbatches=topology.microbatches,
        advice=topology.advice,
        replicas=[pb.Replica(**_fields(replica)) for replica in topology.replicas],
    )


def _stage_message(stage: StageDescription) -> pb.Stage:
    ranks = [pb.StageRank(**_fields(rank)) for rank in stage.ranks]
    given = {**_fields(stage), "ranks": ranks}
    del given["steps"]
    return pb.Stage(**given)


def _fields(
    description: StageDescription | RankDescription | ReplicaDescription | Limits | TimingsOutput,
) -> dict[str, Any]:
    """Its fields under the proto's names, in which units are written out."""
    return {
        re.sub("_s$", "_seconds", field.name): getattr(description, field.name) for field in fields(description)
    }
