"""The sequences of the steps in flight. A lane is a place for one step; the next step takes the lowest free lane.

How many steps are in flight, and in which lanes, is recorded in the book of steps alone (`core.ledger.steps`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from ppserve.core.ledger.steps import Steps
from ppserve.core.plan import Slice, StepPlan, StepResult
from ppserve.core.scheduling.sequence import Sequence

Parts = tuple[tuple[Sequence, Slice], ...]
"""The slices of a step, each with its sequence."""


class Lanes:
    """Numbers steps, and keeps the sequences of each step until its result is committed."""

    def __init__(self, steps: Steps, num_lanes: int, epoch: int) -> None:
        self.num_lanes = num_lanes
        self.epoch = epoch
        self._steps = steps
        self._parts: dict[int, Parts] = {}
        self._next_step_id = 0

    def __len__(self) -> int:
        """Steps whose result has not been committed."""
        return len(self._parts)

    @property
    def full(self) -> bool:
        return self._steps.num_in_flight >= self.num_lanes

    def plan(self, parts: Parts, copies: Seq[tuple[int, int]]) -> StepPlan:
        """A new step in the lowest free lane."""
        used = {step.plan.lane for step in self._steps.in_flight}
        lane = next(lane for lane in range(len(used) + 1) if lane not in used)
        plan = StepPlan(self.epoch, self._next_step_id, lane, tuple(piece for _, piece in parts), tuple(copies))
        self._parts[plan.step_id] = parts
        self._next_step_id += 1
        return plan

    def take(self, result: StepResult) -> Parts | None:
        """The slices and sequences of the step that returned; None if unknown or of an older epoch."""
        return self._parts.pop(result.step_id, None) if result.epoch == self.epoch else None

    def lose(self, epoch: int) -> frozenset[str]:
        """Forget the steps in flight. Returns the ids of their requests."""
        assert epoch > self.epoch, (epoch, self.epoch)
        self.epoch = epoch
        requests = frozenset(s.request.id for parts in self._parts.values() for s, _ in parts if s.is_live)
        self._parts.clear()
        return requests

    def holds_others_than(self, request_id: str) -> bool:
        return any(sequence.request.id != request_id for parts in self._parts.values() for sequence, _ in parts)
