"""How many steps are kept in flight: as many as the P stages, or one more.

With P slots a step is sent only when an earlier one has returned, so whatever delays one stage (the return of
tokens, a chunk of a prompt) delays all. One slot more gives the stages a step to compute meanwhile. But then every
step is smaller, and each round pays the fixed cost of one step more.

Per step of the busiest stage, let c be the part of its computation that does not depend on the step's size (mostly
reading weights), o its other work (inputs, sending) and w its wait. One more slot costs (c + o) / P per step and
saves at most w. So there are P + 1 slots while

    w > (c + o) / P.

The wait with P slots cannot be seen while there are P + 1, so it is measured again from time to time.
"""

from __future__ import annotations

from collections.abc import Callable

from ppserve.core.plan import StepResult, StepStamps

MEASURED_STEPS = 64
"""Steps of each stage by which the wait is measured."""
HELD_STEPS = 16 * MEASURED_STEPS
"""Steps for which P + 1 slots are kept before the wait is measured again."""
# P + 1 slots begin only where the wait exceeds their cost by this factor, and stay while it exceeds the cost.
HYSTERESIS = 1.25


class SlotCount:
    """The number of slots of one replica. fixed_s: the seconds of a step on a stage that its size does not change,
    as estimated now."""

    def __init__(self, num_stages: int, fixed_s: Callable[[int], float]) -> None:
        self.num_slots = self._num_stages = num_stages
        self._fixed_s = fixed_s
        self._had_one_more = False
        self._steps_left = 0  # of those that the present number is kept for, on the last stage
        self._measure()

    def observe(self, result: StepResult, was_full: bool) -> int:
        """A stage's next result. was_full: all slots were in use when the step was sent. Returns the number of
        slots from now on."""
        stage, at = result.stage, result.stamps
        before_ns, self._sent_ns[stage] = self._sent_ns[stage], at.sent if was_full else None
        if self._num_stages == 1 or before_ns is None or not was_full:
            return self.num_slots
        self._steps_left -= stage == self._num_stages - 1
        if self._steps_left > 0:
            return self.num_slots
        if self.num_slots > self._num_stages:
            self._had_one_more = True
            self._change(self._num_stages)
        else:
            self._add(stage, at, before_ns)
            if min(self._num_measured) >= MEASURED_STEPS:
                self._decide()
        return self.num_slots

    def lose_stage(self) -> None:
        """A stage's next step does not follow its last one."""
        self._sent_ns: list[int | None] = [None] * self._num_stages

    def _add(self, stage: int, at: StepStamps, before_ns: int) -> None:
        free_ns = max(before_ns, at.planned)
        own_ns = at.awaited - free_ns + at.begun - at.received + at.sent - at.ended
        self._waited_s[stage] += (free_ns - before_ns + at.received - at.awaited) / 1e9
        self._own_s[stage] += own_ns / 1e9
        self._computed_s[stage] += (at.ended - at.begun) / 1e9
        self._num_measured[stage] += 1

    def _decide(self) -> None:
        busiest = max(range(self._num_stages), key=self._computed_s.__getitem__)
        fixed_s = min(self._fixed_s(busiest) * self._num_measured[busiest], self._computed_s[busiest])
        cost_s = (fixed_s + self._own_s[busiest]) / self._num_stages
        pays = self._waited_s[busiest] > cost_s * (1.0 if self._had_one_more else HYSTERESIS)
        self._had_one_more = False
        if pays:
            self._change(self._num_stages + 1)
        else:
            self._measure()

    def _change(self, num_slots: int) -> None:
        """Steps in flight were sent with the old number, so the next ones of each stage tell nothing."""
        self.num_slots = num_slots
        self._steps_left = HELD_STEPS if num_slots > self._num_stages else num_slots + 1
        self._measure()

    def _measure(self) -> None:
        self._waited_s, self._own_s, self._computed_s = ([0.0] * self._num_stages for _ in range(3))
        self._num_measured = [0] * self._num_stages
        self.lose_stage()
