"""The sequences of the steps in flight. A slot is a place for one step; the next step takes the lowest free slot.

How many steps are in flight, and in which slots, is recorded in the book of steps alone (`core.ledger.steps`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from ppserve.core.ledger.steps import Step, Steps
from ppserve.core.plan import Slice, StepPlan, StepResult
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.poison_isolation import PROBE
from ppserve.core.scheduling.sequence import Sequence

OwnedSlices = tuple[tuple[Sequence, Slice], ...]
"""The slices of a step, each with its sequence."""

OUTCOMES = ("accepted", "rejected", "cancelled")
"""What becomes of a draft token: its token was drawn; it was computed in vain; it was dropped before it was
computed."""


class MicrobatchSlots:
    """Numbers steps, and keeps the sequences of each step until its result is committed.

    draft tokens: how many have had each of the OUTCOMES so far. is_unproven: no step of this epoch has returned,
    nor any of the epoch before, and that was not the first one; then a probe goes first (`quarantine`).
    """

    def __init__(self, steps: Steps, config: SchedulerConfig, epoch: int) -> None:
        self.num_slots = config.microbatches or config.num_stages
        self._runs_ahead = config.runs_ahead
        self.epoch = epoch
        self._steps = steps
        self._parts: dict[int, OwnedSlices] = {}
        self._void: dict[int, set[int]] = {}  # by step: the sequences whose slice nobody needs
        self._doomed: list[int] = []
        self.draft_tokens = dict.fromkeys(OUTCOMES, 0)
        self._next_step_id = 0
        self.is_unproven, self._has_returned = False, True

    def __len__(self) -> int:
        """Steps whose result has not been committed."""
        return len(self._parts)

    @property
    def full(self) -> bool:
        """Whether no step of known tokens may be sent. Steps on draft tokens do not count: they must not delay
        others. So at most as many steps are in flight as slots and stages together."""
        return self._steps.num_known >= self.num_slots

    @property
    def have_gap(self) -> bool:
        """Whether a stage would stand idle although a step on draft tokens could be sent."""
        return self._steps.num_in_flight < min(self.num_slots, self._steps.num_stages)

    @property
    def num_before_first_stage(self) -> int:
        """Steps that stage 0 has not reported."""
        return sum(step.first_owing() == 0 for step in self._steps.in_flight)

    @property
    def drawing_alone(self) -> list[Sequence]:
        """The sequences for which the only step in flight draws; none where no step may be sent ahead."""
        if not self._runs_ahead or self.num_slots > 1 or len(self._parts) != 1:
            return []
        (parts,) = self._parts.values()
        return [sequence for sequence, piece in parts if piece.draw is not None and sequence.is_live]

    def drawing(self, sequence: Sequence) -> tuple[Step, Slice] | None:
        """The step in flight that draws the sequence's next token, and its slice."""
        known = len(sequence.token_ids)
        for step in self._steps.in_flight:
            if sequence.id in self._void.get(step.plan.step_id, ()):
                continue
            for owner, piece in self._parts.get(step.plan.step_id, ()):
                if owner is sequence and piece.start < known <= piece.end:
                    return step, piece
        return None

    def plan(self, parts: OwnedSlices, copies: Seq[tuple[int, int]]) -> StepPlan:
        """A new step in the lowest free slot; without parts, a probe."""
        used = {step.plan.slot for step in self._steps.in_flight}
        slot = next(slot for slot in range(len(used) + 1) if slot not in used)
        slices = tuple(piece for _, piece in parts) or (PROBE,)
        plan = StepPlan(self.epoch, self._next_step_id, slot, slices, tuple(copies))
        self._parts[plan.step_id] = parts
        self._next_step_id += 1
        return plan

    def take(self, result: StepResult) -> tuple[OwnedSlices, set[int]] | None:
        """The slices and sequences of the step that returned, and the ids of the sequences whose slice is void;
        None if the step is unknown or of an older epoch."""
        if result.epoch != self.epoch or result.step_id not in self._parts:
            return None
        self.is_unproven, self._has_returned = False, True
        parts, rejected = self._parts.pop(result.step_id), self._void.pop(result.step_id, set())
        num_void = sum(piece.num_draft_tokens for sequence, piece in parts if sequence.id in rejected)
        self.draft_tokens["cancelled" if result.skipped else "rejected"] += num_void
        return parts, rejected

    def drawn(self, sequence: Sequence, token_id: int) -> None:
        """A sequence's next token. If it is not the one that was drafted, the draft tokens are dropped."""
        was_guessed = bool(sequence.draft_tokens)
        num_dropped = sequence.commit_token(token_id)
        self.drop_draft_tokens(sequence, num_dropped, sequence.scheduled)
        self.draft_tokens["accepted"] += was_guessed and not num_dropped

    def drop_draft_tokens(self, sequence: Sequence, num_dropped: int, start: int) -> None:
        """So many draft tokens are dropped: one was wrong, or nobody needs them now. Slices of draft tokens alone
        from position `start` on are void."""
        if not num_dropped:
            return
        num_void = self._void_slices(sequence, start, lambda piece: piece.is_draft)
        self.draft_tokens["rejected"] += num_dropped - num_void

    def drop_ahead(self, sequence: Sequence, start: int) -> None:
        """Nobody needs what was sent ahead for the sequence from position `start` on."""
        if self._runs_ahead:
            self._void_slices(sequence, start, lambda piece: piece.is_ahead)

    def _void_slices(self, sequence: Sequence, start: int, concerns: Callable[[Slice], bool]) -> int:
        """How many draft tokens were in them. A step that has no other slices is cancelled: it need not be
        computed."""
        num_draft_tokens = 0
        for step_id, parts in self._parts.items():
            for owner, piece in parts:
                # Some may have become void before, and still be in flight.
                is_new = owner is sequence and sequence.id not in self._void.get(step_id, ())
                if is_new and piece.start >= start and concerns(piece):
                    rejected = self._void.setdefault(step_id, set())
                    rejected.add(sequence.id)
                    num_draft_tokens += piece.num_draft_tokens
                    if len(rejected) == len(parts):
                        self._doomed.append(step_id)
        return num_draft_tokens

    def take_cancelled(self) -> tuple[int, ...]:
        """Steps that became cancelled since the last call."""
        cancelled_steps, self._doomed = tuple(self._doomed), []
        return cancelled_steps

    def lose(self, epoch: int) -> frozenset[str]:
        """Forget the steps in flight. Returns the ids of their requests."""
        assert epoch > self.epoch, (epoch, self.epoch)
        self.epoch = epoch
        self.is_unproven, self._has_returned = not self._has_returned, False
        requests = frozenset(s.request.id for parts in self._parts.values() for s, _ in parts if s.is_live)
        for step_id, parts in self._parts.items():
            rejected = self._void.get(step_id, set())
            self.draft_tokens["cancelled"] += sum(piece.num_draft_tokens for s, piece in parts if s.id in rejected)
        self._parts.clear()
        self._void.clear()
        self._doomed.clear()
        return requests

    def holds_others_than(self, request_id: str) -> bool:
        return any(sequence.request.id != request_id for parts in self._parts.values() for sequence, _ in parts)
