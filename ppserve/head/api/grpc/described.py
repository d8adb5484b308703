"""Makes the messages in which the server describes itself."""

from __future__ import annotations

from ppserve.core.architecture import Architecture
from ppserve.head.descriptions import ModelDescription, RankDescription, StageDescription, Topology
from ppserve.head.engine.replica import ReplicaReading
from ppserve.head.limits import Limits
from ppserve.v1 import generation_pb2 as pb


def model_message(description: ModelDescription) -> pb.GetModelInfoResponse:
    """Make the answer to GetModelInfo."""
    return pb.GetModelInfoResponse(
        model=description.name,
        architecture=_architecture_message(description.architecture, description.num_parameters),
        dtype=description.dtype,
        quantization=description.quantization,
        max_context=description.max_context,
        eos_token_id=description.architecture.eos_id,
        eos_token_ids=description.architecture.eos_ids,
        has_tokenizer=description.has_tokenizer,
        limits=_limits_message(description.limits, description.max_context),
        deterministic=description.deterministic,
        nondeterministic_reason=description.nondeterministic_reason,
        version=description.version,
        kernels=description.kernels,
        kv_dtype=description.kv_dtype,
    )


def _architecture_message(arch: Architecture, num_parameters: int) -> pb.Architecture:
    return pb.Architecture(
        num_layers=arch.num_layers,
        width=arch.width,
        num_heads=arch.num_heads,
        inner_width=arch.inner_width,
        vocab_size=arch.vocab_size,
        max_positions=arch.max_positions,
        num_parameters=num_parameters,
        family=arch.family,
    )


def _limits_message(limits: Limits, max_context: int) -> pb.Limits:
    return pb.Limits(
        max_prompt_bytes=limits.max_prompt_bytes,
        max_prompt_tokens=max_context,
        max_n=limits.max_n,
        max_stop=limits.max_stop,
        max_stop_bytes=limits.max_stop_bytes,
        max_stop_token_ids=limits.max_stop_token_ids,
        max_logprobs=limits.max_logprobs,
        max_logit_bias=limits.max_logit_bias,
        max_request_id_bytes=limits.max_request_id_bytes,
        max_message_bytes=limits.max_message_bytes,
        max_metadata_bytes=limits.max_metadata_bytes,
    )


def topology_message(topology: Topology, metrics_port: int = 0) -> pb.GetTopologyResponse:
    """Make the answer to GetTopology."""
    return pb.GetTopologyResponse(
        stages=map(_stage_message, topology.stages),
        transport=topology.transport,
        epoch=topology.epoch,
        microbatches=topology.microbatches,
        advice=topology.advice,
        replicas=map(_replica_message, topology.replicas),
        status=topology.status,
        metrics_port=metrics_port,
    )


def _replica_message(reading: ReplicaReading) -> pb.Replica:
    return pb.Replica(
        replica=reading.replica,
        serves=reading.serves,
        epoch=reading.epoch,
        microbatches=reading.microbatches,
        running=reading.running,
        kv_usage=reading.kv_usage,
    )


def _stage_message(stage: StageDescription) -> pb.Stage:
    return pb.Stage(
        stage=stage.stage,
        rank=stage.rank,
        host=stage.host,
        device=stage.device,
        first_layer=stage.first_layer,
        num_layers=stage.num_layers,
        layers=stage.layers,
        num_parameters=stage.num_parameters,
        weight_bytes=stage.weight_bytes,
        kv_bytes=stage.kv_bytes,
        predicted_step_seconds=stage.predicted_step_s,
        measured_step_seconds=stage.measured_step_s,
        busy_seconds=stage.busy_s,
        bubble_seconds=stage.bubble_s,
        idle_seconds=stage.idle_s,
        live=stage.live,
        restarts=stage.restarts,
        replica=stage.replica,
        ranks=map(_rank_message, stage.ranks),
        state=stage.state,
    )


def _rank_message(rank: RankDescription) -> pb.StageRank:
    return pb.StageRank(
        rank=rank.rank,
        tensor=rank.tensor,
        host=rank.host,
        device=rank.device,
        num_parameters=rank.num_parameters,
        gather_seconds=rank.gather_s,
        live=rank.live,
        restarts=rank.restarts,
        state=rank.state,
    )
