"""The slots of steps in flight: each slot has a step, and the step has slices of sequences.

`slot_count` chooses how many slots there are. A step that is sent ahead is one more (`sent_ahead`). The book of
steps (`core.ledger.steps`), and not this module, knows when each stage got and reported a step.
"""

from __future__ import annotations

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


class OwnedStep(NamedTuple):
    """A step in flight, and the slices with their sequences."""

    plan: StepPlan
    owned: OwnedSlices


PROBE = Slice(None, 0, (0,), (0,), Draw(SamplingParams(temperature=0.0)))
"""The only slice of a probe. It computes one token, in a block whose content nobody uses, for no sequence: nobody
reads the token that it draws."""


class MicrobatchSlots:
    """The steps in flight, numbered, each with its sequences until its result is committed."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots  # so many steps may be in flight, not counting one that is sent ahead
        self.epoch = 0
        # No step has returned in this epoch, nor did one in the last: a probe goes first (`PoisonIsolation`).
        self.is_unproven = False
        self._has_returned = True
        self._steps: dict[int, OwnedStep] = {}
        self._next_step_id = 0

    def __len__(self) -> int:
        """Return how many steps are in flight whose result is awaited."""
        return len(self._steps)

    def resize(self, num_slots: int) -> None:
        self.num_slots = num_slots

    def continue_after(self, earlier: MicrobatchSlots) -> None:
        """Take the place of earlier slots. The epoch stays the same, and so does the answer to whether stages may
        need a probe. Steps are numbered from where the earlier slots ended, because a step's id is never used
        twice in a replica."""
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
        """The slices of the step in flight; empty if no step is in flight, or several are."""
        if len(self._steps) != 1:
            return ()
        ((_, owned),) = self._steps.values()
        return owned

    @property
    def steps(self) -> tuple[OwnedStep, ...]:
        """The steps in flight, oldest first."""
        return tuple(self._steps.values())

    @property
    def oldest_step(self) -> OwnedStep | None:
        return next(iter(self._steps.values()), None)

    def hold_others_than(self, request_id: str) -> bool:
        """Return whether a step in flight has a slice of another request."""
        return any(each.sequence.request.id != request_id for _, owned in self._steps.values() for each in owned)

    def add_step(self, owned: OwnedSlices, is_ahead: bool = False, awaits_masks: bool = False) -> StepPlan:
        """Return the plan of a new step in the lowest free slot. Without slices it is a probe."""
        used = {plan.slot for plan, _ in self._steps.values()}
        slot = next(slot for slot in range(len(used) + 1) if slot not in used)
        slices = tuple(each.slice for each in owned) or (PROBE,)
        plan = StepPlan(self.epoch, self._next_step_id, slot, slices, is_ahead, awaits_masks)
        self._steps[plan.step_id] = OwnedStep(plan, owned)
        self._next_step_id += 1
        return plan

    def remove_step(self, result: StepResult) -> OwnedSlices | None:
        """Remove the step that returned, and return its slices; None if it is unknown, forgotten or of an older
        epoch."""
        if result.epoch != self.epoch or result.step_id not in self._steps:
            return None
        self.is_unproven = False
        self._has_returned = True
        return self._steps.pop(result.step_id).owned

    def forget_step(self, step_id: int) -> None:
        """Free the slot of a step in flight whose result will not be used."""
        del self._steps[step_id]

    def lose(self) -> frozenset[str]:
        """Forget the steps in flight, because the epoch is lost. Return the ids of their requests."""
        self.epoch += 1
        self.is_unproven = not self._has_returned
        self._has_returned = False
        sequences = [each.sequence for _, owned in self._steps.values() for each in owned]
        requests = frozenset(s.request.id for s in sequences if s.is_live)
        self._steps.clear()
        return requests
