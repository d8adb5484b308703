"""How many slots one replica has, which is how many of its steps may be in flight.

There are as many slots as the P stages, or one more. With P slots a step is sent only when an earlier one has
returned, so what delays one stage (the return of tokens, a chunk of a prompt) delays all. With one slot more the
stages have a step to compute meanwhile. But each step is smaller, and a round pays for one more.

Per step of the busiest stage, let c be the part of its computation that does not depend on the step's size (mostly
reading weights), o its other work (inputs, sending) and w its wait. One more slot costs (c + o) / P per step and
saves at most w. So there are P + 1 slots while

    w > (c + o) / P.

With P + 1 slots that wait cannot be seen, so it is measured again from time to time.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ppserve.core.cost_model import StageCost, StepSize
from ppserve.core.plan import StepResult, StepStamps

MEASURED_STEPS = 64
"""The wait is measured over so many steps of each stage."""
HELD_STEPS = 16 * MEASURED_STEPS
"""P + 1 slots are kept for so many steps before the wait is measured again."""
# P + 1 slots begin where the wait exceeds their cost by this factor, and stay while it exceeds the cost.
HYSTERESIS = 1.25


@dataclass(slots=True)
class _MeasuredSteps:
    """What one stage did in the steps measured so far."""

    num_steps: int = 0
    waited_s: float = 0.0
    computed_s: float = 0.0
    other_s: float = 0.0

    def add(self, at: StepStamps, last_sent_ns: int) -> None:
        """Add a step's times. last_sent_ns: when the stage had sent the step before."""
        free_ns = max(last_sent_ns, at.planned)
        self.num_steps += 1
        self.waited_s += (free_ns - last_sent_ns + at.received - at.awaited) / 1e9
        self.computed_s += (at.ended - at.begun) / 1e9
        self.other_s += (at.awaited - free_ns + at.begun - at.received + at.sent - at.ended) / 1e9


class SlotCount:
    """The number of slots of one replica: as many as its stages, or one more."""

    def __init__(self, costs: Seq[StageCost]) -> None:
        """costs: of each stage, as estimated now."""
        self.num_slots = self._num_stages = num_stages = len(costs)
        self._costs = costs
        self._had_one_more = False  # before the present measurement
        self._steps_left = 0  # so many steps of the last stage are still not measured
        self._times = [_MeasuredSteps() for _ in range(num_stages)]
        self._last_sent_ns: list[int | None] = [None] * num_stages  # None: the stage's next step does not count

    def observe(self, result: StepResult, was_full: bool) -> int:
        """Take a stage's next result. Return the number of slots. was_full: all slots were in use when the step
        was sent. Only such steps count, so an epoch's first step, and the outage before it, do not."""
        stage = result.stage
        last_ns = self._last_sent_ns[stage]
        self._last_sent_ns[stage] = result.stamps.sent if was_full else None
        if self._num_stages == 1 or last_ns is None or not was_full:
            return self.num_slots
        if stage == self._num_stages - 1:
            self._steps_left -= 1
        if self._steps_left > 0:
            return self.num_slots
        if self.num_slots > self._num_stages:
            self._change(self._num_stages)
        else:
            self._times[stage].add(result.stamps, last_ns)
            if min(times.num_steps for times in self._times) >= MEASURED_STEPS:
                self._change(self._num_stages + 1 if self._one_more_pays() else self._num_stages)
        return self.num_slots

    def _one_more_pays(self) -> bool:
        """Whether the measured wait of the busiest stage exceeds what one slot more costs."""
        busiest = max(range(self._num_stages), key=lambda stage: self._times[stage].computed_s)
        times = self._times[busiest]
        fixed_s = min(self._costs[busiest].seconds(StepSize()) * times.num_steps, times.computed_s)
        cost_s = (fixed_s + times.other_s) / self._num_stages
        return times.waited_s > cost_s * (1.0 if self._had_one_more else HYSTERESIS)

    def _change(self, num_slots: int) -> None:
        # Steps in flight were sent with the old number of slots, so each stage's next steps do not count.
        self._had_one_more = self.num_slots > self._num_stages
        self.num_slots = num_slots
        self._steps_left = HELD_STEPS if num_slots > self._num_stages else num_slots + 1
        self._times = [_MeasuredSteps() for _ in range(self._num_stages)]
        self._last_sent_ns = [None] * self._num_stages
