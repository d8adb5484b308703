"""Cards as messages, and token ids as TokenInfo."""

from __future__ import annotations

from ppserve.head.cards import ModelCard, StageCard, Topology
from ppserve.v1 import generation_pb2 as pb


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
    )
