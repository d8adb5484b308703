"""Steps that are sent ahead: all that decides about them.

Where one rank computes all of the model, it knows what it has drawn before the head does. So while its only step
is in flight, the next one may be sent, with one token of each sequence for which that step draws. Its plan says
so (`StepPlan.is_ahead`), and has neither these tokens nor what depends on them:

- The tokens are those that the stage has drawn in the step before (`StepPlan.with_drawn`).
- The masks of token filters follow once these tokens have come back (`StepMasks`). A step of a request whose masks
  take long is not sent ahead: it would hold up the others.

A slice of an answer that has ended since is not used. When no slice is needed any more, because all answers have
ended or a request is admitted, which comes first, the step is cancelled: the stage does not compute it, unless it
has begun.

What this brings is in docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ppserve.core.plan import Slice, StepMasks, StepPlan
from ppserve.core.scheduling.block_manager import PrefixCache
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.sequence import Sequence
from ppserve.core.scheduling.slots import MicrobatchSlots, OwnedSlice
from ppserve.core.scheduling.speculation import Speculation


class StepsAhead:
    """Sends steps ahead, has their masks follow, and cancels them."""

    def __init__(
        self, config: SchedulerConfig, slots: MicrobatchSlots, prefix_cache: PrefixCache, speculation: Speculation
    ) -> None:
        self._config = config
        self._slots = slots
        self._prefix_cache = prefix_cache
        self._speculation = speculation
        self._cancelled: set[int] = set()  # their results have not come
        self._newly_cancelled: list[int] = []
        self._without_masks: set[int] = set()  # in flight, and their masks were not sent since

    def schedule(self, running: Mapping[int, Sequence], others_wait: bool) -> StepPlan | None:
        """Return the next step, when all slots are full and no running sequence is ready. Return None if it must
        not be sent ahead, or if draft tokens or a waiting request come next."""
        # The stage may have computed a cancelled step: then what it drew last is not what the next one follows.
        if not self._config.runs_ahead or self._slots.num_slots > 1 or self._cancelled:
            return None
        before = self._slots.only_step
        drawing = [s for s, slice_ in before if slice_.draw and s.is_live and s.num_free_positions > 0]
        makes_room = others_wait and len(drawing) < len(before)
        has_drafts = any(slice_.num_draft_tokens for _, slice_ in before)
        has_slow_masks = any(s.masks is not None and s.masks.is_slow for s in drawing)
        if not drawing or makes_room or has_drafts or has_slow_masks:
            return None
        if any(self._speculation.draft(s, running) for s in drawing):
            return None
        owned = tuple(OwnedSlice(sequence, sequence.schedule_ahead()) for sequence in drawing)
        for sequence in drawing:
            self._prefix_cache.offer(sequence)
        plan = self._slots.add_step(owned, is_ahead=True, awaits_masks=any(s.masks is not None for s in drawing))
        if plan.awaits_masks:
            self._without_masks.add(plan.step_id)
        return plan

    # Masks

    @property
    def filtered(self) -> Iterator[Sequence]:
        """The sequences whose masks the oldest step in flight awaits. The tokens before these are known now."""
        oldest = self._slots.oldest_step
        if oldest is not None and oldest.plan.step_id in self._without_masks:
            yield from (s for s, _ in oldest.owned if s.masks is not None and s.is_live)

    def take_masks(self) -> StepMasks | None:
        """Return the masks of the oldest step in flight, if it awaits them and all are there. The masks of a step
        are returned once."""
        oldest = self._slots.oldest_step
        if oldest is None or oldest.plan.step_id not in self._without_masks:
            return None
        masks: list[bytes | None] = []
        for sequence, _ in oldest.owned:
            if sequence.is_live and not sequence.find_mask():
                return None
            masks.append(sequence.mask_after(()) if sequence.is_live else None)
        self._without_masks.remove(oldest.plan.step_id)
        return StepMasks(oldest.plan.epoch, oldest.plan.step_id, tuple(masks))

    # Steps that nobody needs

    def cancel_unused(self) -> None:
        """Cancel the steps of which no slice is used, as an answer has ended."""
        self._cancel(self._is_unused)

    def cancel_unneeded(self) -> None:
        """Cancel the steps that may as well be sent later, as a request is admitted."""
        self._cancel(self._is_unneeded)

    def _is_unused(self, sequence: Sequence, slice_: Slice) -> bool:
        """Whether a slice is of an answer that has ended, and writes no block that others share."""
        num_shared = sequence.num_published * self._config.block_size
        return not sequence.is_live and slice_.start >= num_shared

    def _is_unneeded(self, sequence: Sequence, slice_: Slice) -> bool:
        """Whether a slice is unused, or may be sent later: its token is not drawn yet."""
        if sequence.is_live:
            return slice_.start >= len(sequence.token_ids)
        return self._is_unused(sequence, slice_)

    def _cancel(self, is_unneeded: Callable[[Sequence, Slice], bool]) -> None:
        for plan, owned in self._slots.steps:
            if plan.is_ahead and all(is_unneeded(*each) for each in owned):
                self._slots.forget_step(plan.step_id)
                self._without_masks.discard(plan.step_id)
                self._cancelled.add(plan.step_id)
                self._newly_cancelled.append(plan.step_id)
                for sequence, _ in owned:
                    sequence.cancel_ahead()

    def take_cancelled(self) -> tuple[int, ...]:
        """Return the ids of the steps that were cancelled since the last call."""
        cancelled = tuple(self._newly_cancelled)
        self._newly_cancelled.clear()
        return cancelled

    # The end of steps

    def note_returned(self, step_id: int) -> None:
        """Note that the result of a step of this epoch has come."""
        self._cancelled.discard(step_id)
        self._without_masks.discard(step_id)

    def lose(self) -> None:
        """Forget the steps in flight, because the epoch is lost."""
        self._cancelled.clear()
        self._newly_cancelled.clear()
        self._without_masks.clear()
