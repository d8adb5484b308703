"""From plain values to messages."""

from __future__ import annotations

from collections.abc import Callable

from ppserve.core.request import FinishReason, Request
from ppserve.head.api.stream import Delta, Score
from ppserve.head.cards import ModelCard, StageCard, Topology
from ppserve.v1 import generation_pb2 as pb

REASONS = {reason: pb.Finish.Reason.Value(reason.value) for reason in FinishReason}


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
            message.timings.queue_seconds = last.timings.queue_s
            message.timings.prefill_seconds = last.timings.prefill_s
            message.timings.ttft_seconds = last.timings.ttft_s
            message.timings.decode_seconds = last.timings.decode_s
            message.timings.stage_busy_seconds.extend(last.timings.stage_busy_s)

    def _token(self, token_id: int, score: Score) -> pb.TokenInfo:
        token = pb.TokenInfo(id=token_id, bytes=self._token_bytes(token_id))
        if score is not None:
            token.logprob = score.logprob
            for top_id, logprob in score.top:
                token.top.add(id=top_id, bytes=self._token_bytes(top_id), logprob=logprob)
        return token


def model_message(card: ModelCard) -> pb.GetModelInfoResponse:
    """GetModelInfo's answer."""
    arch, limits = card.architecture, card.limits
    return pb.GetModelInfoResponse(
        model=card.name,
        architecture=pb.Architecture(
            num_layers=arch.num_layers,
            width=arch.width,
            num_heads=arch.num_heads,
            inner_width=arch.inner_width,
            vocab_size=arch.vocab_size,
            max_positions=arch.max_positions,
            num_parameters=card.num_parameters,
        ),
        dtype=card.dtype,
        quantization=card.quantization,
        max_context=card.max_context,
        eos_token_id=card.eos_id,
        has_tokenizer=card.has_tokenizer,
        limits=pb.Limits(
            max_prompt_bytes=limits.max_prompt_bytes,
            max_prompt_tokens=card.max_context,
            max_n=limits.max_n,
            max_stop=limits.max_stop,
            max_stop_bytes=limits.max_stop_bytes,
            max_stop_token_ids=limits.max_stop_token_ids,
            max_logprobs=limits.max_logprobs,
            max_logit_bias=limits.max_logit_bias,
            max_request_id_bytes=limits.max_request_id_bytes,
            max_message_bytes=limits.max_message_bytes,
            max_metadata_bytes=limits.max_metadata_bytes,
        ),
        deterministic=card.deterministic,
        nondeterministic_reason=card.why_not,
        kernels=card.kernels,
        kv_dtype=card.kv_dtype,
        version=card.version,
    )


def topology_message(topology: Topology) -> pb.GetTopologyResponse:
    """GetTopology's answer."""
    return pb.GetTopologyResponse(
        stages=[_stage_message(stage) for stage in topology.stages],
        transport=topology.transport,
        epoch=topology.epoch,
        microbatches=topology.microbatches,
        advice=topology.advice,
        replicas=[
            pb.Replica(
                replica=of.replica,
                serves=of.serves,
                epoch=of.epoch,
                microbatches=of.microbatches,
                running=of.running,
                kv_usage=of.kv_usage,
            )
            for of in topology.replicas
        ],
    )


def _stage_message(card: StageCard) -> pb.Stage:
    return pb.Stage(
        stage=card.stage,
        rank=card.rank,
        host=card.host,
        device=card.device,
        first_layer=card.first_layer,
        num_layers=card.num_layers,
        blocks=card.blocks,
        num_parameters=card.num_parameters,
        weight_bytes=card.weight_bytes,
        kv_bytes=card.kv_bytes,
        predicted_step_seconds=card.predicted_step_s,
        measured_step_seconds=card.measured_step_s,
        busy_seconds=card.busy_s,
        bubble_seconds=dict(card.bubble_s),
        idle_seconds=card.idle_s,
        live=card.live,
        restarts=card.restarts,
        replica=card.replica,
        tensor=card.tensor,
    )
