"""Which draft tokens are computed: those that cost less than the time that they are likely to save.

Width: a step that decodes takes draft tokens as further rows of a sequence. A step of few rows takes hardly
longer with one row more, because most of its time goes into reading weights.

Depth: where no sequence is ready and stages would stand idle, a step is sent on draft tokens alone, while the
step that draws the true token is still on its way. A right draft token has its next token that much earlier. A
wrong one is cancelled, and delays the right step by what stage 0 has still to do for it.

A draft token is made only where it pays: by the drafter's experience with the sequence, and by what rows were
measured to cost a lone sequence (`row_cost`) or, with several, by the times that the cost model predicts. So with
many sequences in a step nothing is drafted. Rows of draft tokens lengthen a step for all who wait for it, so with
several sequences running they may do so only a little. And whether there are draft tokens of either kind is
decided by the measured time from token to token (`speculation_trial`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection

from ppserve.core.cost_model import StepSize
from ppserve.core.plan import Slice
from ppserve.core.scheduling.composer import CostModel
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.drafter import DraftToken, NewDrafter
from ppserve.core.scheduling.microbatch_slots import MicrobatchSlots
from ppserve.core.scheduling.row_cost import RowCost
from ppserve.core.scheduling.sequence import Sequence
from ppserve.core.scheduling.speculation_trial import SpeculationTrial, Way

Pick = tuple[Sequence, int]
"""A sequence, and how many of its tokens a step takes."""

# With several sequences, predicted savings must be this many times the predicted cost.
WORTH = 1.5
# With several sequences running, draft tokens may make a step this many times as long: others wait for it too.
MOST_STRETCH = 1.025
# A step on draft tokens is sent when stage 0 will have done what is before it within so many seconds. So it hardly
# waits there, where a request that arrives would have to wait for it.
MOST_WAIT_S = 0.0005
# The most rows of one sequence in a step that decodes.
MAX_WIDTH = 16
# As long as a lone sequence's steps are to tell what rows cost.
EXPLORED_WIDTH = 4
# Draft tokens that are less likely right are not made, even where they are said to cost nothing: they
# still take energy, and time of processors that others share.
LEAST_PROBABILITY = 0.1
# For so long after a request came beside others nothing is drafted: the next one would wait for the rest of such
# steps. So draft tokens are made only where others come less often than that.
PAUSE_S = 2.0


class Speculation:
    """Extends the composer's picks."""

    def __init__(
        self, config: SchedulerConfig, slots: MicrobatchSlots, costs: CostModel | None, new_drafter: NewDrafter
    ) -> None:
        self._forced = config.speculate
        self._max_rows = config.max_step_tokens
        self._slots = slots
        self._costs = costs
        self._new_drafter = new_drafter
        self._row_cost = RowCost()
        self._trial = SpeculationTrial(self._row_cost.forget)
        self._paused_until_s = 0.0

    @property
    def _way(self) -> Way:
        if self._forced is None:
            return self._trial.way
        return Way.DEEP if self._forced else Way.PLAIN

    def tokens_returned(self, of: Sequence, piece: Slice, num_tokens: int, num_running: int, now: float) -> None:
        """A step brought tokens of a sequence. piece: its slice in the step."""
        if of.returned_s is not None and self._forced is None:
            if num_running == 1 and self._way is not Way.DEEP and not piece.is_draft:
                self._row_cost.observe(piece.num_draft_tokens, now - of.returned_s)
            if of.returned_s >= self._paused_until_s:
                self._trial.observe(num_running, of.returned_s, now, num_tokens)
        of.note_returned(now)

    def widen(self, picks: list[Pick], running: Collection[Sequence], now: float) -> list[Pick]:
        """The picks of a step, with draft tokens; unchanged where the step has tokens of prompts."""
        if self._way is Way.PLAIN or any(sequence.remaining > 1 or sequence.known_end for sequence, _ in picks):
            return picks
        return picks if self._is_paused(running, now) else self._with_guesses(picks, len(running))

    def deepen(self, running: Collection[Sequence], now: float) -> list[Pick]:
        """Picks of draft tokens alone, of sequences whose known tokens are all in steps."""
        if self._way is not Way.DEEP or self._is_paused(running, now):
            return []
        if self._slots.num_before_first_stage * self._seconds(StepSize().with_slice(0, 1, 1)) > MOST_WAIT_S:
            return []
        picks = []
        for sequence in running:
            if (
                sequence.remaining
                or sequence.known_end
                or (draft_token := sequence.next_draft(self._new_drafter)) is None
            ):
                continue
            if self._forced or self._pays_deep(sequence, sequence.certainty * draft_token.probability):
                self._add(sequence, draft_token)
                picks.append((sequence, 1))
        return self._with_guesses(picks, len(running))

    def may_draft(self, running: Collection[Sequence], now: float) -> bool:
        """Whether the next step may have draft tokens: they follow known tokens, so it is not sent ahead."""
        return self._way is not Way.PLAIN and not self._is_paused(running, now)

    def make_way(self, running: Collection[Sequence], now: float) -> None:
        """A request is admitted. Steps on draft tokens alone could delay it: they are void."""
        if running:
            self._paused_until_s = now + PAUSE_S
        for sequence in running:
            if sequence.draft_tokens and (drawing := self._slots.drawing(sequence)) is not None:
                end = drawing[1].end
                self._slots.drop_draft_tokens(sequence, sequence.drop_drafts(end), end)

    def _is_paused(self, running: Collection[Sequence], now: float) -> bool:
        """Whether first tokens are computed, or may be soon. Draft tokens could delay them: stages may share
        cores."""
        if self._forced:
            return False
        return now < self._paused_until_s or any(sequence.returned_s is None for sequence in running)

    def _pays_deep(self, sequence: Sequence, probability: float) -> bool:
        """Whether a step on a draft token, sent now, is likely to gain more time than it is likely to cost."""
        if self._costs is None or probability < LEAST_PROBABILITY:
            return False
        each_s = self._costs.predict_each(StepSize().with_slice(sequence.scheduled, 1, 1))
        begins_s = self._slots.num_before_first_stage * each_s[0]
        drawing = self._slots.drawing(sequence)
        token_due_s = sum(each_s[drawing[0].first_owing() if drawing else 0 :])
        gained_s, lost_s = token_due_s - begins_s, begins_s + each_s[0] - token_due_s
        return probability * gained_s > (1 - probability) * max(0.0, lost_s)

    def _with_guesses(self, picks: list[Pick], num_running: int) -> list[Pick]:
        """Adds draft tokens as rows, the likeliest first, as long as they pay."""
        if not picks:
            return picks
        if num_running == 1 and not self._forced:
            ((sequence, width),) = picks
            return [(sequence, width + self._draft_alone(sequence))]
        # One row of each, which is drawn from.
        size = StepSize(len(picks), sum(sequence.scheduled + 1 for sequence, _ in picks), len(picks))
        most_rows = (self._forced or MAX_WIDTH - 1) + (picks[0][0].remaining > 0)
        step_s = self._seconds(size)
        token_s = step_s / len(picks)
        most_s = math.inf if self._forced else MOST_STRETCH * step_s
        wider_s = self._seconds(size.with_slice(picks[0][0].scheduled, 1, 1))
        if not self._pays_wide(1.0, token_s, wider_s - step_s):
            return picks  # not even a draft token that is surely right
        widths = [num_tokens for _, num_tokens in picks]
        likeliest: list[tuple[float, int, DraftToken]] = []  # the first number is the probability's negative
        for place, (sequence, width) in enumerate(picks):
            if width < most_rows:
                self._consider(likeliest, place, sequence)
        while likeliest and size.rows < self._max_rows:
            minus_probability, place, draft_token = heapq.heappop(likeliest)
            sequence = picks[place][0]
            wider = size.with_slice(sequence.scheduled + widths[place], 1, 1)
            wider_s = self._seconds(wider)
            if wider_s > most_s or not self._pays_wide(-minus_probability, token_s, wider_s - step_s):
                break
            size, step_s = wider, wider_s
            self._add(sequence, draft_token)
            widths[place] += 1
            if widths[place] < most_rows:
                self._consider(likeliest, place, sequence)
        return [(sequence, width) for (sequence, _), width in zip(picks, widths, strict=True)]

    def _draft_alone(self, sequence: Sequence) -> int:
        """Draft tokens that a step of a lone sequence takes as further rows: as long as each brings more tokens
        per second than the step would have without it."""
        most = min(MAX_WIDTH if self._row_cost.is_known else EXPLORED_WIDTH, self._max_rows) - 1
        row, step, tokens, count = self._row_cost.share(), 1.0, sequence.certainty, 0
        while count < most and (draft_token := sequence.next_draft(self._new_drafter)) is not None:
            probability = sequence.certainty * draft_token.probability
            if probability < LEAST_PROBABILITY or probability * step <= row * tokens:
                break
            self._add(sequence, draft_token)
            step, tokens, count = step + row, tokens + probability, count + 1
        return count

    def _add(self, sequence: Sequence, draft_token: DraftToken) -> None:
        sequence.add_draft(draft_token)
        self._trial.drafted()

    def _consider(self, likeliest: list[tuple[float, int, DraftToken]], place: int, sequence: Sequence) -> None:
        if (draft_token := sequence.next_draft(self._new_drafter)) is not None:
            heapq.heappush(likeliest, (-sequence.certainty * draft_token.probability, place, draft_token))

    def _pays_wide(self, probability: float, token_s: float, row_s: float) -> bool:
        """Whether a row is likely to save more than `row_s`, which it takes. token_s: what a right draft token
        saves."""
        if self._forced:
            return True
        return probability >= LEAST_PROBABILITY and probability * token_s > WORTH * row_s

    def _seconds(self, size: StepSize) -> float:
        return 0.0 if self._costs is None else self._costs.predict(size)
