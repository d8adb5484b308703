"""The book of steps in flight: each in a slot, with the sequences that it holds.

How many slots there are is chosen by `slot_count`.

Where one rank computes all of the model, it knows what it has drawn before the head does. So one further step may
be sent ahead (`StepPlan.is_ahead`). The slice of an answer that has ended is not used.
If all end, or a request is admitted, the step is cancelled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ppserve.core.plan import Draw, Slice, StepPlan, StepResult
from ppserve.core.request import SamplingParams
from ppserve.core.scheduling.sequence import Sequence


class OwnedSlice(NamedTuple):
    """A slice of a step, and the sequence of which it is."""

    sequence: Sequence
    slice: Slice


OwnedSlices = tuple[OwnedSlice, ...]
"""The slices of a step."""

PROBE = Slice(-1, 0, (0,), (0,), Draw(SamplingParams(temperature=0.0)))
"""The only slice of a probe: one token, computed while no block's content can be used. It is of no sequence, and
nobody reads its id or what it draws."""


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
        self._without_masks: set[int] = set()  # sent ahead, as far as they were not sent since
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
        return any(each.sequence.request.id != request_id for _, owned in self._steps.values() for each in owned)

    def add_step(self, owned: OwnedSlices, is_ahead: bool = False) -> StepPlan:
        """A new step in the lowest free slot; without slices, a probe."""
        used = {plan.slot for plan, _ in self._steps.values()}
        slot = next(slot for slot in range(len(used) + 1) if slot not in used)
        slices = tuple(each.slice for each in owned) or (PROBE,)
        plan = StepPlan(self.epoch, self._next_step_id, slot, slices, is_ahead)
        self._steps[plan.step_id] = plan, owned
        if plan.awaits_masks:
            self._without_masks.add(plan.step_id)
        self._next_step_id += 1
        return plan

    @property
    def next_without_masks(self) -> tuple[StepPlan, OwnedSlices] | None:
        """The oldest step in flight, if it was sent ahead without its masks: the tokens before these are known."""
        oldest = next(iter(self._steps), None)
        return self._steps[oldest] if oldest is not None and oldest in self._without_masks else None

    def note_masks_sent(self, step_id: int) -> None:
        self._without_masks.remove(step_id)

    def remove_step(self, result: StepResult) -> OwnedSlices | None:
        """The slices of the step that returned; None if it is unknown, cancelled or of an older epoch."""
        if result.epoch != self.epoch:
            return None
        self._cancelled.discard(result.step_id)
        self._without_masks.discard(result.step_id)
        if result.step_id not in self._steps:
            return None
        self.is_unproven = False
        self._has_returned = True
        return self._steps.pop(result.step_id)[1]

    def cancel_ahead(self, is_unused: Callable[[Sequence, Slice], bool]) -> None:
        """Cancel the step that was sent ahead, if there is one and all of its slices are unused."""
        for step_id, (plan, owned) in self._steps.items():
            if plan.is_ahead and all(is_unused(*each) for each in owned):
                del self._steps[step_id]
                self._without_masks.discard(step_id)
                self._cancelled.add(step_id)
                self._newly_cancelled.append(step_id)
                for each in owned:
                    each.sequence.cancel_ahead()
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
        sequences = [each.sequence for _, owned in self._steps.values() for each in owned]
        requests = frozenset(s.request.id for s in sequences if s.is_live)
        self._steps.clear()
        self._cancelled.clear()
        self._newly_cancelled.clear()
        self._without_masks.clear()
        return requests
