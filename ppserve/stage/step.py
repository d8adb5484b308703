"""A stage that computes one step after another, each from a plan to a result.

T tokens, D width.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ppserve.core.plan import RankResult, StepPlan, StepStamps
from ppserve.model.backend import CachedModel
from ppserve.stage.transport import Transport
from ppserve.stage.transport.gather import NoGather, StageGather


@dataclass(frozen=True, slots=True)
class Computed:
    """A rank's result of a step, and the hidden states after its last layer."""

    result: RankResult
    hidden_TD: torch.Tensor


class Stage:
    """A part of the model with its cache, and its connections. It is used by one thread, apart from `interrupt`.

    A stage lives for one epoch, as its connections do. The model and its cache may outlive it. transport: to the
    previous and the next stage. gather: to the other tensor ranks of the stage. with_masks: waits for the masks of
    a plan that awaits them, and returns the plan with them.
    """

    def __init__(
        self,
        model: CachedModel,
        transport: Transport,
        gather: StageGather | None = None,
        with_masks: Callable[[StepPlan], StepPlan] = lambda plan: plan,
    ) -> None:
        self.model = model
        self.layout = model.layout
        self.transport = transport
        self._gather = gather or NoGather()
        self._with_masks = with_masks

    def warm_up(self) -> None:
        """Send a row over every connection, so that all of them exist."""
        self.transport.warm_up()
        if self.layout.num_tensor > 1:
            own_11 = torch.zeros(1, 1, device=self.model.backend.device)
            self._gather.all(own_11, self.layout.cut(self.layout.num_tensor))

    def interrupt(self) -> None:
        """End all waits with TransportError. Another thread may call this. `close` must still be called."""
        self._gather.interrupt()
        self.transport.interrupt()

    def close(self) -> None:
        """Close the connections, which wakes up ranks that wait for this stage. It may be called twice."""
        self._gather.close()
        self.transport.close()

    def expect(self, plan: StepPlan) -> None:
        """Prepare for a plan's hidden states, which may then arrive during another step. Call this once for each
        plan, in order, before its `step`. Raises TransportError."""
        if not self.layout.is_first:
            self.transport.post_receive(plan)

    def step(self, plan: StepPlan, planned_ns: int) -> Computed:
        """Receive hidden states, compute, and send the results on. planned_ns: when the plan arrived. Raises
        TransportError."""
        clock = time.monotonic_ns
        layout = self.layout
        model = self.model
        gather = self._gather
        if plan.awaits_masks and not model.backend.reads_masks_last:
            plan = self._with_masks(plan)
        prepared = model.prepare(plan, gather)
        awaited_ns = clock()
        received_TD = None if layout.is_first else self.transport.receive(plan)
        received_ns = clock()
        timing, waited_ns = model.backend.timing(), gather.waited_ns
        hidden_TD = prepared.forward(received_TD)
        masked_ns = 0
        if plan.awaits_masks:
            computed_ns = clock()
            plan = self._with_masks(plan)
            masked_ns = clock() - computed_ns
        reading = prepared.read_out(hidden_TD, plan) if layout.is_last else None
        timing.computed()
        # Hidden states are sent before the host waits: transfers between devices follow the computation by
        # themselves.
        bytes_sent = 0 if layout.is_last else self.transport.send(plan, hidden_TD)
        begun_ns, ended_ns = timing.busy_ns()
        drawn, scored = reading() if reading is not None else ((), ())
        gathered_ns = min(gather.waited_ns - waited_ns + masked_ns, ended_ns - begun_ns)
        if not layout.is_first:
            # On a GPU, hidden states may arrive later than `receive` returns, but before the computation begins.
            received_ns = max(received_ns, begun_ns)
        stamps = StepStamps(planned_ns, awaited_ns, received_ns, begun_ns, ended_ns, sent=clock())
        result = RankResult(
            epoch=plan.epoch,
            step_id=plan.step_id,
            place=layout.place,
            stamps=stamps,
            bytes_sent=bytes_sent,
            drawn=drawn,
            scored=scored,
            gathered_ns=gathered_ns,
        )
        return Computed(result, hidden_TD)
