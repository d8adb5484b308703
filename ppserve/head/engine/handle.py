"""The engine as the front door sees it: requests in, and cards that describe what is served."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ppserve import __version__, wire
from ppserve.config import ServeConfig
from ppserve.core.ledger.account import Settled, StageTimes
from ppserve.core.ledger.advice import advise
from ppserve.core.partition import mean
from ppserve.core.request import FinishReason, Request
from ppserve.head.cards import ModelCard, StageCard, Topology
from ppserve.head.engine.layout import max_context
from ppserve.head.engine.loop import Engine
from ppserve.head.engine.members import Member, Members, StageState
from ppserve.head.engine.output import Sink
from ppserve.head.limits import Limits
from ppserve.head.observe.live import describe_schedule, describe_state
from ppserve.head.observe.observer import Observer
from ppserve.tokenizer import Tokenizer


class PipelineHandle:
    """Implements `EngineHandle`. Made once the pipeline has formed for the first time."""

    def __init__(self, engine: Engine, members: Members, observer: Observer, card: ModelCard) -> None:
        self._engine = engine
        self._members = members
        self._observer = observer
        self._card = card
        self._predicted_step_s = predicted_step_s(members)

    async def submit(self, request: Request, sink: Sink) -> None:
        await self._engine.submit(request, sink)

    def cancel(self, request_id: str, reason: FinishReason) -> None:
        self._engine.cancel(request_id, reason)

    def model_card(self) -> ModelCard:
        return self._card

    def topology(self) -> Topology:
        return self._advised(*self._engine.ask(lambda _now_s: self._topology()))

    def stage_times(self) -> tuple[StageTimes, ...]:
        """Every stage's time up to now, as one consistent reading."""
        return self._engine.ask(lambda _now_s: self._observer.stage_times(time.monotonic_ns()))

    def _topology(self) -> tuple[Topology, tuple[StageTimes, ...]]:
        members, decision = self._members, self._members.decision
        assert decision is not None
        times = self._observer.stage_times(time.monotonic_ns())
        topology = Topology(
            stages=tuple(self._stage_card(m, t) for m, t in zip(members.stages, times, strict=True)),
            transport=decision.transport,
            epoch=members.epoch,
            microbatches=self._engine.microbatches,
        )
        return topology, times

    def _advised(self, topology: Topology, times: tuple[StageTimes, ...]) -> Topology:
        """Outside the engine's thread: looking for a better split takes a while."""
        decision = self._members.decision
        assert decision is not None
        return replace(topology, advice=advise(times, decision.layouts, topology.microbatches))

    def cost_sheet(self) -> dict[str, Any]:
        """What steps cost on every stage, as `ppserve plan --costs` reads it. Zeros until steps were seen."""
        return self._engine.ask(lambda _now_s: self._cost_sheet())

    def _cost_sheet(self) -> dict[str, Any]:
        decision = self._members.decision
        assert decision is not None
        stages = []
        for layout, cost in zip(decision.layouts, self._observer.costs.stages, strict=True):
            c = cost.mean
            terms = {"step_s": c.step, "row_s": c.row, "key_s": c.key, "sample_s": c.sample, "spread": cost.spread}
            stages.append({"layers": layout.num_sublayers / 2, "steps": cost.num_observed, **terms})
        overheads = asdict(self._observer.overheads.times)
        return {"stages": stages, "max_chunk": self._engine.max_chunk, "overheads": overheads}

    def state(self) -> dict[str, Any]:
        """What the live page shows; see `ppserve.head.observe.live`."""
        # The engine's thread only copies; the describing is done in the caller's.
        topology, times, spans, now_ns = self._engine.ask(lambda _now_s: self._state())
        topology = self._advised(topology, times)
        state = describe_state(self._card, topology, times, self._observer.metrics.reading(), now_ns)
        for stage, schedule in zip(state["stages"], describe_schedule(spans, now_ns), strict=True):
            stage["spans"] = schedule
        return state

    def _state(self) -> tuple[Topology, tuple[StageTimes, ...], list[list[Settled]], int]:
        now_ns = time.monotonic_ns()
        return *self._topology(), self._observer.schedule.recent(), now_ns

    def _stage_card(self, member: Member, times: StageTimes) -> StageCard:
        decision, hello, loaded = self._members.decision, member.hello, member.loaded
        assert decision is not None and hello is not None and loaded is not None  # noqa: PT018
        layout = decision.layouts[member.stage]
        return StageCard(
            stage=member.stage,
            rank=member.stage,
            host=hello.host,
            device=loaded.device,
            first_layer=layout.layers.start,
            num_layers=len(layout.layers),
            blocks=layout.span,
            num_parameters=loaded.params,
            weight_bytes=loaded.weight_bytes,
            kv_bytes=self._members.num_blocks * loaded.block_bytes,
            predicted_step_s=self._predicted_step_s[member.stage] if self._predicted_step_s else None,
            measured_step_s=self._observer.mean_step_s(member.stage),
            busy_s=sum(times.busy_ns.values()) / 1e9,
            bubble_s=tuple((cause, ns / 1e9) for cause, ns in times.bubble_ns.items()),
            idle_s=times.idle_ns / 1e9,
            live=member.state is StageState.READY,
            restarts=member.restarts,
        )


def predicted_step_s(members: Members) -> tuple[float, ...]:
    """Of every stage, by what `--layers auto` measured; () if it did not."""
    measured = tuple(m.hello.costs for m in members.stages if m.hello is not None and m.hello.costs is not None)
    if len(measured) < members.num_stages or members.decision is None:
        return ()
    parts = mean(measured)
    return tuple(parts.stage_cost(layout) for layout in members.decision.layouts)


def why_not_deterministic(loaded: tuple[wire.Loaded, ...]) -> list[str]:
    """Which promises do not hold; empty when all do. loaded: of every stage, in order."""
    reasons = [f"stage {stage}: {of.why_not}" for stage, of in enumerate(loaded) if of.why_not]
    first = loaded[0].kernels
    for stage, of in enumerate(loaded):
        if of.kernels != first:
            reasons.append(
                f"stage 0 computes with {first}, stage {stage} with {of.kernels}: company, chunks and lost stages"
                " change nothing, but other layers per stage, or stages on other hosts, may give other tokens"
            )
            break
    return reasons


def describe_model(config: ServeConfig, members: Members, tokenizer: Tokenizer | None) -> ModelCard:
    hello, decision = members.stages[0].hello, members.decision
    assert hello is not None and decision is not None  # noqa: PT018
    arch, limits = hello.architecture, Limits()
    reasons = why_not_deterministic(tuple(m.loaded for m in members.stages if m.loaded is not None))
    return ModelCard(
        # Not the whole path: callers have no business with the server's directories.
        name=Path(config.model.path).name,
        architecture=arch,
        num_parameters=arch.num_params,
        dtype=decision.dtype,
        quantization=config.model.quantization,
        max_context=max_context(config, arch),
        eos_id=arch.eos_id,
        has_tokenizer=tokenizer is not None,
        deterministic=not reasons,
        why_not="; ".join(reasons),
        version=__version__,
        limits=replace(limits, max_n=min(limits.max_n, config.scheduling.max_num_seqs)),
    )
