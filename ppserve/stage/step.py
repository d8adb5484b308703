"""A stage that computes: one step of the pipeline after another, each from a plan to a result.

T tokens, D width.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ppserve.core.plan import Drawn, Scored, StepPlan, StepResult, StepStamps
from ppserve.model.backend import KVCache
from ppserve.model.gpt2 import GPT2Stage
from ppserve.model.inputs import build_inputs
from ppserve.stage.transport import Transport


@dataclass(frozen=True, slots=True)
class Computed:
    """What a stage made of a step. hidden_TD: after its last layer; on the last stage these are sent nowhere."""

    result: StepResult
    hidden_TD: torch.Tensor


class Stage:
    """A part of the model with its cache, and the transport that joins it to its neighbours; used by one thread.

    It lives as long as the transport: one epoch. Model and cache may outlive it.
    """

    def __init__(self, model: GPT2Stage, cache: KVCache, transport: Transport) -> None:
        self.model = model
        self.layout = model.layout
        self.transport = transport
        self._cache = cache

    def expect(self, plan: StepPlan) -> None:
        """Once per plan, in order, before its `step`: hidden states can arrive while an earlier step is computed.

        Raises TransportError.
        """
        if not self.layout.is_first:
            self.transport.post_receive(plan)

    def step(self, plan: StepPlan, planned_ns: int) -> Computed:
        """Receive, compute, hand on. planned_ns: when the plan came, for the stamps. Raises TransportError."""
        clock, layout, model = time.monotonic_ns, self.layout, self.model
        inputs = build_inputs(plan, layout, self._cache)
        awaited_ns = clock()
        received_TD = None if layout.is_first else self.transport.receive(plan)
        received_ns = clock()
        begun_ns = clock()
        hidden_TD = model.forward(inputs, received_TD, self._cache)
        drawn: tuple[Drawn, ...] = ()
        scored: tuple[Scored, ...] = ()
        if layout.is_last:
            drawn, scored = model.read_out(plan, inputs, hidden_TD)
        model.backend.synchronize()
        ended_ns = clock()
        bytes_sent = 0 if layout.is_last else self.transport.send(plan, hidden_TD)
        stamps = StepStamps(planned_ns, awaited_ns, received_ns, begun_ns, ended_ns, sent=clock())
        result = StepResult(plan.epoch, plan.step_id, layout.stage, stamps, bytes_sent, drawn, scored)
        return Computed(result, hidden_TD)
