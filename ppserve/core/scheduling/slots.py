"""The slots: how many steps may be in flight, and which sequences each of them holds.

There are as many slots as the P stages, or one more. With P slots a step is sent only when an earlier one has
returned, so what delays one stage (the return of tokens, a chunk of a prompt) delays all. With one slot more the
stages have a step to compute meanwhile. But each step is smaller, and a round pays for one more.

Per step of the busiest stage, let c be the part of its computation that does not depend on the step's size (mostly
reading weights), o its other work (inputs, sending) and w its wait. One more slot costs (c + o) / P per step and
saves at most w. So there are P + 1 slots while

    w > (c + o) / P.

With P + 1 slots that wait cannot be seen, so it is measured again from time to time.

Where one rank computes all of the model, it knows what it has drawn before the head does. So one further step may
be sent ahead (`StepPlan.is_ahead`). The slice of an answer that has ended is not used.
If all end, or a request is admitted, the step is cancelled.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ppserve.core.cost_model import StageCost, StepSize
from ppserve.core.plan import Draw, Slice, StepPlan, StepResult, StepStamps
from ppserve.core.request import SamplingParams
from ppserve.core.scheduling.sequence import Sequence

OwnedSlices = tuple[tuple[Sequence, Slice], ...]
"""The slices of a step, each with its sequence."""

PROBE = Slice(-1, 0, (0,), (0,), Draw(SamplingParams(temperature=0.0)))
"""The only slice of a probe: one token, computed while no block's content can be used."""


class MicrobatchSlots:
    """The steps in flight, numbered, each with its sequences until its result is committed."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots  # how many steps may be in flight, but for one that is sent ahead
        self.epoch = 0
        # No step returned in this epoch, nor in the one before: a probe goes first (`PoisonIsolation`).
        self.is_unproven = False
        self._has_returned = True
        self._steps: dict[int, tuple[StepPlan, OwnedSlices]] = {}
        self._cancelled: set[int] = set()  # still in flight
        self._newly_cancelled: list[int] = []
        self._next_step_id = 0

    def __len__(self) -> int:
        """Steps whose result is awaited."""
        return len(self._steps)

    def resize(self, num_slots: int) -> None:
        self.num_slots = num_slots

    def continue_after(self, earlier: MicrobatchSlots) -> None:
        """Number steps from where these slots ended, as a step's id is never used twice in a replica. Whether a
        step has returned in their last epochs counts as well."""
        self.epoch = earlier.epoch
        self.is_unproven = earlier.is_unproven
        self._has_returned = earlier._has_returned
        self._next_step_id = earlier._next_step_id

    def begin_epoch(self, epoch: int) -> None:
        assert epoch >= self.epoch, (epoch, self.epoch)
        self.epoch = epoch

    @property
    def are_full(self) -> bool:
        return len(self._steps) >= self.num_slots

    @property
    def only_step(self) -> OwnedSlices:
        """The slices of the only step in flight; empty if there are others, also cancelled ones."""
        if len(self._steps) != 1 or self._cancelled:
            return ()
        ((_, owned),) = self._steps.values()
        return owned

    def hold_others_than(self, request_id: str) -> bool:
        return any(s.request.id != request_id for _, owned in self._steps.values() for s, _ in owned)

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
        """The slices of the step that returned; None if it is unknown, cancelled or of an older epoch."""
        if result.epoch != self.epoch:
            return None
        self._cancelled.discard(result.step_id)
        if result.step_id not in self._steps:
            return None
        self.is_unproven = False
        self._has_returned = True
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
        cancelled = tuple(self._newly_cancelled)
        self._newly_cancelled.clear()
        return cancelled

    def lose(self) -> frozenset[str]:
        """Forget the steps in flight. Returns the ids of their requests."""
        self.epoch += 1
        self.is_unproven = not self._has_returned
        self._has_returned = False
        sequences = [s for _, owned in self._steps.values() for s, _ in owned]
        requests = frozenset(s.request.id for s in sequences if s.is_live)
        self._steps.clear()
        self._cancelled.clear()
        self._newly_cancelled.clear()
        return requests


MEASURED_STEPS = 64
"""Steps of each stage by which the wait is measured."""
HELD_STEPS = 16 * MEASURED_STEPS
"""Steps for which P + 1 slots are kept before the wait is measured again."""
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
        """last_sent_ns: when the stage was done with the step before."""
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
        self._steps_left = 0  # on the last stage, until steps are measured
        self._times = [_MeasuredSteps() for _ in range(num_stages)]
        self._last_sent_ns: list[int | None] = [None] * num_stages  # None where the next step does not count

    def observe(self, result: StepResult, was_full: bool) -> int:
        """A stage's next result. Returns the number of slots. was_full: all were in use when it was sent: so an
        epoch's first step, and the outage before it, do not count."""
        stage = result.stage
        last_ns = self._last_sent_ns[stage]
        self._last_sent_ns[stage] = result.stamps.sent if was_full else None
        if self._num_stages == 1 or last_ns is None or not was_full:
            return self.num_slots
        self._steps_left -= stage == self._num_stages - 1
        if self._steps_left > 0:
            return self.num_slots
        if self.num_slots > self._num_stages:
            self._change(self._num_stages)
        else:
            self._times[stage].add(result.stamps, last_ns)
            if min(times.num_steps for times in self._times) >= MEASURED_STEPS:
                self._change(self._num_stages + self._one_more_pays())
        return self.num_slots

    def _one_more_pays(self) -> bool:
        busiest = max(range(self._num_stages), key=lambda stage: self._times[stage].computed_s)
        times = self._times[busiest]
        fixed_s = min(self._costs[busiest].seconds(StepSize()) * times.num_steps, times.computed_s)
        cost_s = (fixed_s + times.other_s) / self._num_stages
        return times.waited_s > cost_s * (1.0 if self._had_one_more else HYSTERESIS)

    def _change(self, num_slots: int) -> None:
        # Steps in flight were sent with the old number, so the next ones of each stage tell nothing.
        self._had_one_more = self.num_slots > self._num_stages
        self.num_slots = num_slots
        self._steps_left = HELD_STEPS if num_slots > self._num_stages else num_slots + 1
        self._times = [_MeasuredSteps() for _ in range(self._num_stages)]
        self._last_sent_ns = [None] * self._num_stages
