"""The engine as the protocols use it: it takes requests, and describes the model and the pipelines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from ppserve.config import ServeConfig
from ppserve.core.ledger.advice import advise
from ppserve.core.partition import mean
from ppserve.core.request import FinishReason, Request
from ppserve.head.descriptions import (
    Limits,
    LoadDescription,
    ModelDescription,
    RankDescription,
    StageDescription,
    Topology,
)
from ppserve.head.engine.loop import Engine
from ppserve.head.engine.member import Member, StageState
from ppserve.head.engine.members import Members
from ppserve.head.engine.replica import ReplicaReading, StageReading
from ppserve.head.engine.streams import OpenRequest, Sink
from ppserve.tokenizer import Tokenizer, load_tokenizer

# Reading so many tokens of a resumed answer takes a millisecond, in which the event loop would stand still.
_MANY_HELD = 256


class EngineHandle:
    """The engine in the event loop, for all protocols."""

    def __init__(self, engine: Engine, description: ModelDescription, tokenizer: Tokenizer | None) -> None:
        self.description = description
        """The model as served."""
        self._engine = engine
        self._tokenizer = tokenizer

    async def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request, whose outputs go to `sink`. Raises RequestError (Overloaded, Draining, ...)."""
        what = request, sink, self._tokenizer, self.description.eos_id
        is_long = len(request.resume_ids) > _MANY_HELD
        opened = await asyncio.to_thread(OpenRequest, *what) if is_long else OpenRequest(*what)
        await asyncio.wrap_future(self._engine.submit(opened))

    def cancel(self, request_id: str, reason: FinishReason) -> None:
        """End a request. Nothing happens if it has ended, or is unknown."""
        self._engine.cancel(request_id, reason)

    async def restart(self, replica: int, pauses: bool) -> None:
        """Restart a replica's stage processes; return when it serves again. Raises RequestError.

        pauses: also if no other replica could serve its streams, which then wait.
        """
        begun = await asyncio.wrap_future(self._engine.restart(replica, pauses))
        await asyncio.wrap_future(begun)

    # These wait for the engine's thread: call them in a thread, not in the event loop.

    def topology(self) -> Topology:
        """What runs where, and where its time went."""
        return describe_topology(self._engine.snapshot())

    def load(self) -> LoadDescription:
        """How full the replicas that serve are."""
        return describe_load(self._engine.snapshot())


def describe_load(readings: Sequence[ReplicaReading]) -> LoadDescription:
    """A replica that does not serve holds nothing, unless none serves."""
    scheduling = readings[0].decision.scheduling
    there = [reading for reading in readings if reading.serves] or readings
    num_blocks = sum(reading.num_blocks for reading in there)
    return LoadDescription(
        running=sum(reading.running for reading in readings),
        waiting=readings[0].num_waiting,
        max_running=len(there) * scheduling.max_num_seqs,
        kv_tokens=num_blocks * scheduling.block_size,
        kv_usage=sum(reading.kv_usage * reading.num_blocks for reading in there) / num_blocks,
    )


def describe_topology(readings: Sequence[ReplicaReading]) -> Topology:
    """With advice, which may search for a better split: not for the engine's thread."""
    stages: list[StageDescription] = []
    advice = []
    for reading in readings:
        stages += map(_describe_stage, [reading] * len(reading.stages), reading.stages, predict_steps(reading))
        if found := advise(reading.stage_times, reading.decision.layouts, reading.microbatches):
            advice.append(f"Replica {reading.replica}: " * (len(readings) > 1) + found)
    return Topology(
        stages=tuple(stages),
        replicas=tuple(readings),
        transport=readings[0].decision.transport,
        epoch=1 + sum(reading.epoch - 1 for reading in readings),
        microbatches=readings[0].microbatches,
        advice=" ".join(advice),
    )


def _describe_stage(reading: ReplicaReading, stage: StageReading, predicted_s: float | None) -> StageDescription:
    first, times, num_ranks = stage.ranks[0], stage.times, len(stage.ranks)
    loaded = [rank.loaded for rank in stage.ranks if rank.loaded is not None]
    ranks = tuple(map(_describe_rank, stage.ranks, stage.gathered_ns))
    assert len(loaded) == num_ranks
    layout = reading.decision.layouts[first.stage]
    busy_s = times.computed_ns / 1e9
    return StageDescription(
        replica=reading.replica,
        stage=first.stage,
        rank=first.rank,
        host=ranks[0].host,
        device=f"{num_ranks} x " * (num_ranks > 1) + loaded[0].device,
        first_layer=layout.layers.start,
        num_layers=len(layout.layers),
        layers=layout.span,
        num_parameters=sum(rank.params for rank in loaded),
        weight_bytes=sum(rank.weight_bytes for rank in loaded),
        kv_bytes=sum(reading.num_blocks * rank.block_bytes for rank in loaded),
        predicted_step_s=predicted_s,
        measured_step_s=busy_s / stage.steps if stage.steps else None,
        busy_s=busy_s,
        bubble_s={cause: ns / 1e9 for cause, ns in times.bubble_ns.items()},
        idle_s=times.idle_ns / 1e9,
        live=all(rank.live for rank in ranks),
        restarts=sum(rank.restarts for rank in ranks),
        steps=stage.steps,
        ranks=ranks,
    )


def _describe_rank(member: Member, gathered_ns: int) -> RankDescription:
    hello, loaded = member.hello, member.loaded
    assert hello is not None
    assert loaded is not None
    return RankDescription(
        rank=member.rank,
        tensor=member.tensor,
        host=hello.host.name,
        device=loaded.device,
        num_parameters=loaded.params,
        gather_s=gathered_ns / 1e9,
        live=member.state is StageState.READY,
        restarts=member.restarts,
    )


def predict_steps(reading: ReplicaReading) -> tuple[float | None, ...]:
    """Seconds of a step on every stage, by the mean of what the ranks measured; None if they did not."""
    layouts = reading.decision.layouts
    hellos = [rank.hello for stage in reading.stages for rank in stage.ranks]
    costs = [hello.costs.get(layouts[0].num_tensor) for hello in hellos if hello is not None]
    measured = tuple(each for each in costs if each is not None)
    if len(measured) < len(hellos):
        return (None,) * len(layouts)
    parts = mean(measured)
    return tuple(parts.stage_cost(layout) for layout in layouts)


def why_not_deterministic(members: Iterable[Member]) -> list[str]:
    """Why tokens may depend on more than the request; empty if they do not. members: of all replicas."""
    loaded = [(member.stage, member.loaded) for member in members if member.loaded is not None]
    reasons = list(dict.fromkeys(f"stage {stage}: {of.why_not}" for stage, of in loaded if of.why_not))
    kernels = dict.fromkeys(of.kernels for _, of in loaded)
    if len(kernels) > 1:
        problem = (
            f"ranks compute with different kernels ({'; '.join(kernels)}): other requests, chunks and lost stages"
            " change nothing, but other layers per stage, another host or another replica may give other tokens"
        )
        common = [name for name in loaded[0][1].variants if all(name in of.variants for _, of in loaded)]
        remedy = f"; set PPSERVE_CPU_KERNELS={common[-1]} on every host" if common else ""
        reasons.append(problem + remedy)
    return reasons


def describe_model(config: ServeConfig, replicas: Sequence[Members]) -> tuple[ModelDescription, Tokenizer | None]:
    """The model as served, and its tokenizer. Every rank has loaded its part."""
    decision, hello = replicas[0].decision, replicas[0].first.hello
    assert decision is not None
    assert hello is not None
    # Beside the weights that stage 0, on this host, has opened: so a hub id is downloaded once.
    tokenizer = load_tokenizer(hello.model.checkpoint, decision.architecture.vocab_size)
    arch, limits = decision.architecture, Limits()
    members = [member for replica in replicas for member in replica.all]
    reasons = why_not_deterministic(members)
    description = ModelDescription(
        # Not the whole path: callers need not know the server's directories.
        name=Path(config.model.path).name,
        architecture=arch,
        num_parameters=arch.num_params,
        dtype=decision.dtype,
        quantization=config.model.quantization,
        max_context=decision.scheduling.max_model_len,
        eos_id=arch.eos_id,
        has_tokenizer=tokenizer is not None,
        deterministic=not reasons,
        why_not="; ".join(reasons),
        version=metadata.version("ppserve"),
        limits=replace(limits, max_n=min(limits.max_n, config.scheduling.max_num_seqs)),
        kernels="; ".join(dict.fromkeys(member.loaded.kernels for member in members if member.loaded is not None)),
        kv_dtype=hello.model.kv_dtype,
    )
    return description, tokenizer
