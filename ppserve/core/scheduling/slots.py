"""The book of steps in flight: each in a slot, with the sequences that it holds.

`slot_count` chooses how many slots there are.

Where one rank computes all of the model, it knows the tokens that it has drawn before the head does. So one
further step may be sent ahead, before its tokens are drawn (`StepPlan.is_ahead`). If an answer ends meanwhile, the
result of its slice is not used. If all answers of the step end, or a request is admitted, the step is cancelled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ppserve.core.plan import Draw, Slice, StepPlan, StepResult
from ppserve.core.request import SamplingParams
from ppserve.core.scheduling.sequence import Sequence


class OwnedSlice(NamedTuple):
    """A slice of a step, and the sequence to which it belongs."""

    sequence: Sequence
    slice: Slice


OwnedSlices = tuple[OwnedSlice, ...]
"""The slices of a step."""

PROBE = Slice(-1, 0, (0,), (0,), Draw(SamplingParams(temperature=0.0)))
"""The only slice of a probe. It computes one token, in a block whose content nobody uses, for no sequence: nobody
reads its id or the token that it draws."""


class MicrobatchSlots:
    """The steps in flight, numbered, each with its sequences until its result is committed."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots  # so many steps may be in flight, not counting one that is sent ahead
        self.epoch = 0
        # No step has returned in this epoch, nor did one in the last: a probe goes first (`PoisonIsolation`).
        self.is_unproven = False
        self._has_returned = True
        self._steps: dict[int, tuple[StepPlan, OwnedSlices]] = {}
        self._cancelled: set[int] = set()  # still in flight
        self._newly_cancelled: list[int] = []
        self._without_masks: set[int] = set()  # steps that were sent ahead and whose masks are still to be sent
        self._next_step_id = 0

    def __len__(self) -> int:
        """Return how many steps are in flight whose result is awaited."""
        return len(self._steps)

    def resize(self, num_slots: int) -> None:
        self.num_slots = num_slots

    def continue_after(self, earlier: MicrobatchSlots) -> None:
        """Take the place of earlier slots: go on with their epoch, and number steps from where they ended, because
        a step's id is never used twice in a replica. Whether a step returned in their last epochs counts as
        well."""
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
        """The slices of the only step in flight; empty if there is none, or another, be it a cancelled one."""
        if len(self._steps) != 1 or self._cancelled:
            return ()
        ((_, owned),) = self._steps.values()
        return owned

    def hold_others_than(self, request_id: str) -> bool:
        """Return whether a step in flight has a slice of another request."""
        return any(each.sequence.request.id != request_id for _, owned in self._steps.values() for each in owned)

    def add_step(self, owned: OwnedSlices, is_ahead: bool = False) -> StepPlan:
        """Return the plan of a new step in the lowest free slot. Without slices it is a probe."""
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
        """The oldest step in flight, if it was sent ahead and lacks its masks. They can be made now, because the
        tokens before them are known."""
        oldest = next(iter(self._steps), None)
        return self._steps[oldest] if oldest is not None and oldest in self._without_masks else None

    def note_masks_sent(self, step_id: int) -> None:
        self._without_masks.remove(step_id)

    def remove_step(self, result: StepResult) -> OwnedSlices | None:
        """Remove the step that returned, and return its slices; None if it is unknown, cancelled or of an older
        epoch."""
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
        """Cancel the step that was sent ahead, if there is one and nobody needs any of its slices."""
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
        """Return the ids of the steps that were cancelled since the last call."""
        cancelled = tuple(self._newly_cancelled)
        self._newly_cancelled.clear()
        return cancelled

    def lose(self) -> frozenset[str]:
        """Forget the steps in flight, because the epoch is lost. Return the ids of their requests."""
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
