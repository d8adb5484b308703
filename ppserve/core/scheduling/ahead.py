"""Steps that are sent ahead: before the step in flight has drawn their tokens.

Where one rank computes all of the model, it knows what it has drawn before the head does. So the next step can be
there when it is done, and it need not wait about a millisecond for what the head does with a token. Such a step is
marked in its plan (`StepPlan.is_ahead`). It holds one token of each sequence for which the step in flight draws.

If an answer ends with that token, its slice is computed but not used. If all end, or a request is admitted, the
step is cancelled. No step is sent ahead where another should come first: one of a prompt, or with draft tokens.
"""

from __future__ import annotations

from ppserve.core.plan import Slice
from ppserve.core.scheduling.composer import RunningSet
from ppserve.core.scheduling.sequence import Sequence
from ppserve.core.scheduling.slots import MicrobatchSlots
from ppserve.core.scheduling.speculation import Speculation


class Ahead:
    """Chooses and cancels steps that are sent ahead."""

    def __init__(
        self, slots: MicrobatchSlots, running_set: RunningSet, speculation: Speculation, block_size: int
    ) -> None:
        self._slots = slots
        self._block_size = block_size
        self._running_set = running_set
        self._speculation = speculation

    def choose(self, has_waiting: bool) -> list[Sequence]:
        """The sequences of a step to be sent ahead now; none where there should be none. has_waiting: requests
        wait, and one of them takes a place that becomes free."""
        running_set, parts = self._running_set, self._slots.only_step
        if running_set.ready or any(piece.num_draft_tokens for _, piece in parts):
            return []
        drawing = [s for s, piece in parts if piece.draw is not None and s.is_live and s.num_free_positions > 0]
        if has_waiting and len(drawing) < len(parts):
            return []
        num_running = len(running_set)
        return [] if any(self._speculation.draft(s, num_running) for s in drawing) else drawing

    def make_way(self) -> None:
        """A request is admitted: it need not wait for a step that was sent ahead."""
        self._cancel(also_running=True)

    def cancel_unused(self) -> None:
        """A sequence has ended: the step that was sent ahead is not needed if it was the last one."""
        self._cancel(also_running=False)

    def _cancel(self, also_running: bool) -> None:
        def is_unused(sequence: Sequence, piece: Slice) -> bool:
            if sequence.is_live:
                return also_running and piece.start >= len(sequence.token_ids)
            # Others may share the blocks that it has published, and need what is written there.
            return piece.start >= sequence.num_published * self._block_size

        for sequence, _ in self._slots.cancel_ahead(is_unused):
            sequence.cancel_ahead()
