"""Steps that are sent ahead: before the step in flight has drawn their tokens.

Where one rank computes all of the model, it knows what it has drawn before the head does. So the next step can be
there when it is done, and it need not wait for what the head does with a token, about a millisecond. Whether an
answer ends with that token cannot be known: then its slice is void, like those after a wrong guess. A step is not
sent ahead where another should come first: of a prompt (after a loss, of everybody's), of a request for which a
place is about to become free, or with guesses.
"""

from __future__ import annotations

from ppserve.core.scheduling.intake import Intake
from ppserve.core.scheduling.lanes import Lanes
from ppserve.core.scheduling.roster import Roster
from ppserve.core.scheduling.speculation import Pick, Speculation


class Ahead:
    """Picks the sequences of a step that is sent ahead."""

    def __init__(self, lanes: Lanes, roster: Roster, intake: Intake, speculation: Speculation) -> None:
        self._lanes = lanes
        self._roster = roster
        self._intake = intake
        self._speculation = speculation

    def picks(self, now: float) -> list[Pick]:
        """One token of each sequence for which the only step in flight draws; none if that is not to be done."""
        drawing = self._lanes.drawing_alone
        going_on = [sequence for sequence in drawing if sequence.guess_room > 0]
        if not going_on or self._comes_first(now) or any(sequence.guesses for sequence in drawing):
            return []
        if len(going_on) < len(drawing) and self._intake.num_waiting:  # a place becomes free
            return []
        for sequence in going_on:
            sequence.is_ahead = True
        return [(sequence, 1) for sequence in going_on]

    def _comes_first(self, now: float) -> bool:
        """Whether another step should be the next. Who is in one cannot be displaced for a caller without any."""
        roster, queue = self._roster, self._intake.queue
        if roster.returned or roster.filling or queue.first_of_those_without() is not None:
            return True
        return self._speculation.may_guess(roster.running, now)

    def make_way(self) -> None:
        """A request is admitted: it need not wait for a step that was sent ahead."""
        for sequence in self._roster.running:
            if sequence.is_ahead:
                known = len(sequence.token_ids)
                sequence.withdraw(known)
                self._lanes.drop_ahead(sequence, known)
