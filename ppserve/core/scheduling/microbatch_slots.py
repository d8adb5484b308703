"""The steps in flight, with their sequences. A slot is a place for one step; the next takes the lowest free."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from ppserve.core.plan import Slice, StepPlan, StepResult
from ppserve.core.scheduling.poison_isolation import PROBE
from ppserve.core.scheduling.sequence import Sequence

OwnedSlices = tuple[tuple[Sequence, Slice], ...]
"""The slices of a step, each with its sequence."""


class MicrobatchSlots:
    """Numbers steps, and keeps the sequences of each step until its result is committed."""

    num_slots: int
    """How many steps may be in flight, but for one that is sent ahead."""
    is_unproven: bool
    """No step of this epoch has returned, nor any of the epoch before, and that was not the first one: then a
    probe goes first (`poison_isolation`)."""

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
        """The slices of the only step in flight. None if there are others, also cancelled ones: then it is not
        certain which step the stage computes last."""
        if len(self._steps) != 1 or self._cancelled:
            return ()
        ((_, owned),) = self._steps.values()
        return owned

    def add_step(self, owned: OwnedSlices, copies: Seq[tuple[int, int]], is_ahead: bool = False) -> StepPlan:
        """A new step in the lowest free slot; without slices, a probe."""
        used = {plan.slot for plan, _ in self._steps.values()}
        slot = next(slot for slot in range(len(used) + 1) if slot not in used)
        slices = tuple(piece for _, piece in owned) or (PROBE,)
        plan = StepPlan(self.epoch, self._next_step_id, slot, slices, tuple(copies), is_ahead)
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

    def cancel_ahead(self, is_unused: Callable[[Sequence, Slice], bool]) -> OwnedSlices:
        """Cancels the step that was sent ahead, if all of its slices are unused. Returns these."""
        for step_id, (plan, owned) in self._steps.items():
            if plan.is_ahead and all(is_unused(sequence, piece) for sequence, piece in owned):
                del self._steps[step_id]
                self._cancelled.add(step_id)
                self._newly_cancelled.append(step_id)
                return owned
        return ()

    def take_cancelled(self) -> tuple[int, ...]:
        """Steps that were cancelled since the last call."""
        cancelled, self._newly_cancelled = tuple(self._newly_cancelled), []
        return cancelled

    def lose(self, epoch: int) -> frozenset[str]:
        """Forget the steps in flight. Returns the ids of their requests."""
        assert epoch > self.epoch, (epoch, self.epoch)
        self.epoch = epoch
        self.is_unproven, self._has_returned = not self._has_returned, False
        requests = frozenset(s.request.id for _, owned in self._steps.values() for s, _ in owned if s.is_live)
        self._steps.clear()
        self._cancelled.clear()
        self._newly_cancelled.clear()
        return requests

    def hold_others_than(self, request_id: str) -> bool:
        return any(s.request.id != request_id for _, owned in self._steps.values() for s, _ in owned)
