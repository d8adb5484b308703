"""The steps in flight. A lane is a slot for one of them; the lowest free number is the next to be used."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ppserve.core.plan import Slice, StepPlan, StepResult
from ppserve.core.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Step:
    """A step in flight: its plan, and whose each slice is."""

    plan: StepPlan
    parts: tuple[tuple[Sequence, Slice], ...]


class Lanes:
    """Numbers steps and remembers them until their result comes, in one epoch at a time."""

    def __init__(self, num_lanes: int, epoch: int) -> None:
        self.num_lanes = num_lanes
        self.epoch = epoch
        self._steps: dict[int, Step] = {}
        self._next_step_id = 0

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps.values())

    @property
    def full(self) -> bool:
        return len(self._steps) >= self.num_lanes

    def send(self, parts: Seq[tuple[Sequence, Slice]], copies: Seq[tuple[int, int]]) -> StepPlan:
        """A new step in the lowest free lane."""
        used = {step.plan.lane for step in self}
        lane = next(lane for lane in range(len(used) + 1) if lane not in used)
        plan = StepPlan(self.epoch, self._next_step_id, lane, tuple(piece for _, piece in parts), tuple(copies))
        self._steps[plan.step_id] = Step(plan, tuple(parts))
        self._next_step_id += 1
        return plan

    def receive(self, result: StepResult) -> Step | None:
        """The step that came back; None for one of an older epoch, or unknown."""
        return self._steps.pop(result.step_id, None) if result.epoch == self.epoch else None

    def lose(self, epoch: int) -> frozenset[str]:
        """Forget everything in flight; the ids of the requests it belonged to."""
        assert epoch > self.epoch, (epoch, self.epoch)
        self.epoch = epoch
        requests = frozenset(s.request.id for step in self for s, _ in step.parts if s.is_live)
        self._steps.clear()
        return requests

    def holds_others_than(self, request_id: str) -> bool:
        return any(sequence.request.id != request_id for step in self for sequence, _ in step.parts)

    def check_invariants(self, sequences: Seq[Sequence]) -> None:
        """A sequence is in one step, or in several with consecutive chunks. Raises AssertionError."""
        in_flight: dict[int, list[Slice]] = {}
        for step in self:
            assert len({s.id for s, _ in step.parts}) == len(step.parts), "a sequence twice in one step"
            for sequence, piece in step.parts:
                in_flight.setdefault(sequence.id, []).append(piece)
        for sequence in sequences:
            pieces = in_flight.pop(sequence.id, [])
            assert len(pieces) == sequence.steps_in_flight
            assert 0 <= sequence.computed <= sequence.scheduled <= len(sequence.token_ids)
            position = sequence.computed
            for piece in pieces:
                assert piece.start == position, "slices in flight must follow one another"
                assert piece is pieces[-1] or piece.draw is None, "nothing follows a draw that is in flight"
                position = piece.end
            assert position == sequence.scheduled
        assert not in_flight, "an ended sequence is still in flight"
