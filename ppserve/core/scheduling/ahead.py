"""Steps that are sent ahead: before the step in flight has drawn their tokens.

Where one rank computes all of the model, it knows what it has drawn before the head does. So the next step can be
there when it is done, and it need not wait for what the head does with a token, about a millisecond. Whether an
answer ends with that token cannot be known: then its slice is void, like those after a wrong draft token. A step
is not sent ahead where another should come first: of a prompt (after a loss, of everybody's), of a request for
which a place is about to become free, or with draft tokens.
"""

from __future__ import annotations

from ppserve.core.scheduling.microbatch_slots import MicrobatchSlots
from ppserve.core.scheduling.request_queue import RequestQueue
from ppserve.core.scheduling.running_set import RunningSet
from ppserve.core.scheduling.speculation import Pick, Speculation


class Ahead:
    """Picks the sequences of a step that is sent ahead."""

    def __init__(
        self,
        slots: MicrobatchSlots,
        running_set: RunningSet,
        request_queue: RequestQueue,
        speculation: Speculation,
    ) -> None:
        self._slots = slots
        self._running_set = running_set
        self._request_queue = request_queue
        self._speculation = speculation

    def picks(self, now: float) -> list[Pick]:
        """One token of each sequence for which the only step in flight draws; none if that is not to be done."""
        drawing = self._slots.drawing_alone
        going_on = [sequence for sequence in drawing if sequence.draft_room > 0]
        if not going_on or self._comes_first(now) or any(sequence.draft_tokens for sequence in drawing):
            return []
        if len(going_on) < len(drawing) and self._request_queue.num_waiting:  # a place becomes free
            return []
        for sequence in going_on:
            sequence.run_ahead()
        return [(sequence, 1) for sequence in going_on]

    def _comes_first(self, now: float) -> bool:
        """Whether another step should be the next."""
        running_set = self._running_set
        if running_set.returned or running_set.filling:
            return True
        return self._speculation.may_draft(running_set.running, now)

    def make_way(self) -> None:
        """A request is admitted: it need not wait for a step that was sent ahead."""
        for sequence in self._running_set.running:
            if sequence.is_ahead:
                known = len(sequence.token_ids)
                sequence.drop_drafts(known)
                self._slots.drop_ahead(sequence, known)
