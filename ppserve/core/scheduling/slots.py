"""The slots: how many steps may be in flight, and which sequences each of them holds.

There are as many slots as the P stages, or one more. With P slots a step is sent only when an earlier one has
returned, so whatever delays one stage (the return of tokens, a chunk of a prompt) delays all. One slot more gives
the stages a step to compute meanwhile. But then every step is smaller, and each round pays the fixed cost of one
step more.

Per step of the busiest stage, let c be the part of its computation that does not depend on the step's size (mostly
reading weights), o its other work (inputs, sending) and w its wait. One more slot costs (c + o) / P per step and
saves at most w. So there are P + 1 slots while

    w > (c + o) / P.

The wait with P slots cannot be seen while there are P + 1, so it is measured again from time to time.

Where one rank computes all of the model, it knows what it has drawn before the head does. So one further step may
be sent ahead (`StepPlan.is_ahead`), before the step in flight has drawn its tokens. If an answer ends with that
token, its slice is computed but not used. If all end, or a request is admitted, the step is cancelled.
"""

from __future__ import annotations

from collections.abc import Callable

from ppserve.core.plan import Slice, StepPlan, StepResult, StepStamps
from ppserve.core.scheduling.poison_isolation import PROBE
from ppserve.core.scheduling.sequence import Sequence

OwnedSlices = tuple[tuple[Sequence, Slice], ...]
"""The slices of a step, each with its sequence."""


class MicrobatchSlots:
    """Numbers steps, and keeps the sequences of each step until its result is committed."""

    num_slots: int
    """How many steps may be in flight, but for one that is sent ahead."""
    is_unproven: bool
    """No step has returned in this epoch, nor in the one before it. Then a probe goes first (`poison_isolation`);
    the server's first epoch begins without one."""

    def __init__(self, num_slots: int, epoch: int = 0) -> None:
        self.num_slots = num_slots
        self.epoch = epoch
        self.is_unproven, self._has_returned = False, True
        self._steps: dict[int, tuple[StepPlan, OwnedSlices]] = {}
        self._cancelled: set[int] = set()  # still in flight
        self._newly_cancelled: list[int] = []
        self._next_step_id = 0

    def __len__(self) -> int:
        """Steps whose result is awaited."""
        return len(self._steps)

    def resize(self, num_slots: int) -> None:
        """Steps above the new number finish."""
        self.num_slots = num_slots

    def begin_epoch(self, epoch: int) -> None:
        """The first epoch, or the next one after `lose`, has formed."""
        assert epoch >= self.epoch, (epoch, self.epoch)
        self.epoch = epoch

    @property
    def are_full(self) -> bool:
        return len(self._steps) >= self.num_slots

    @property
    def only_step(self) -> OwnedSlices:
        """The slices of the only step in flight; empty if there are others, also cancelled ones: then it is not
        certain which step the stage computes last."""
        if len(self._steps) != 1 or self._cancelled:
            return ()
        ((_, owned),) = self._steps.values()
        return owned

    def add_step(self, owned: OwnedSlices, is_ahead: bool = False) -> StepPlan:
        """A new step in the lowest free slot; without slices, a probe."""
        used = {plan.slot for plan, _ in self._steps.values()}
        slot = next(slot for slot in range(len(used) + 1) if slot not in used)
        slices = tuple(piece for _, piece in owned) or (PROBE,)
        plan = StepPlan(self.epoch, self._next_step_id, slot, slices, is_ahead)
        self._steps[plan.step_id] = plan, owned
        self._next_step_id += 1
        return plan

    def remove_step(self, result: StepResult) -> OwnedSlices | None:
        """The slices and sequences of the step that returned; None if the step is unknown or of an older epoch."""
        if result.epoch != self.epoch:
            return None
        self._cancelled.discard(result.step_id)
        if result.step_id not in self._steps:
            return None
        self.is_unproven, self._has_returned = False, True
        return self._steps.pop(result.step_id)[1]

    def cancel_ahead(self, is_unused: Callable[[Sequence, Slice], bool]) -> None:
        """Cancel the step that was sent ahead, if there is one and all of its slices are unused."""
        for step_id, (plan, owned) in self._steps.items():
            if plan.is_ahead and all(is_unused(sequence, piece) for sequence, piece in owned):
                del self._steps[step_id]
                self._cancelled.add(step_id)
                self._newly_cancelled.append(step_id)
                for sequence, _ in owned:
                    sequence.cancel_ahead()
                return

    def take_cancelled(self) -> tuple[int, ...]:
        """Steps that were cancelled since the last call."""
        cancelled, self._newly_cancelled = tuple(self._newly_cancelled), []
        return cancelled

    def lose(self) -> frozenset[str]:
        """Forget the steps in flight. Returns the ids of their requests."""
        self.epoch += 1
        self.is_unproven, self._has_returned = not self._has_returned, False
        requests = frozenset(s.request.id for _, owned in self._steps.values() for s, _ in owned if s.is_live)
        self._steps.clear()
        self._cancelled.clear()
        self._newly_cancelled.clear()
        return requests

    def hold_others_than(self, request_id: str) -> bool:
        return any(s.request.id != request_id for _, owned in self._steps.values() for s, _ in owned)


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

    def forget_last_steps(self) -> None:
        """An epoch is lost: a stage's next step does not follow its last one."""
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
        self.forget_last_steps()
