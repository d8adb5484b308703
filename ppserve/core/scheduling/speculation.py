"""Draft tokens: tokens that are computed before they are known, as further rows of a sequence's step.

A step of few rows takes hardly longer with one row more, because most of its time goes into reading weights.
So a step that decodes may take tokens that are likely to follow. Each is drawn from the model as without them.
A draft token that equals the drawn one saves a step; what was computed after a wrong one is dropped.

A draft token is added while the step is then likely to bring more tokens per second:

    probability / row_s  >  tokens / step_s

probability: that it and all before it are right, by the measured acceptance. row_s, step_s: what the row adds and
what the step takes, by the cost model. tokens: expected of the step so far. Draft tokens are made only where one
sequence runs, or fewer than stages: with more, other sequences fill the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from ppserve.core.cost_model import StageCost, StepSize
from ppserve.core.scheduling.composer import MAX_STEP_LIKELY, Pick
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.sequence import Sequence
from ppserve.core.scheduling.token_filter import is_allowed
from ppserve.errors import RequestError

# Most draft tokens of a sequence in one step.
MAX_DRAFT_TOKENS = 15
# Rows also take energy and the head's time, and a step with draft tokens cannot be sent ahead.
MIN_PROBABILITY = 0.25


class DraftToken(NamedTuple):
    token_id: int
    probability: float
    """Probability that it is right, if all tokens before it are."""


class Speculation:
    """Adds draft tokens to the sequences of a step."""

    def __init__(
        self, config: SchedulerConfig, costs: Seq[StageCost], new_drafter: Callable[[Sequence], PromptLookup]
    ) -> None:
        self._forced = config.speculate
        self._max_rows = config.max_step_tokens
        self._most_sequences = max(1, config.num_stages - 1)
        self._costs = costs
        self._new_drafter = new_drafter
        self._drafters: dict[int, PromptLookup] = {}  # by sequence

    def add_drafts(self, picks: list[Pick], running: Mapping[int, Sequence]) -> list[Pick]:
        """The picks of a step with draft tokens; unchanged where it has tokens of prompts."""
        if any(sequence.remaining > 1 or sequence.known_end for sequence, *_ in picks):
            return picks
        drafted, num_rows = [], len(picks)
        for pick in picks:
            draft_ids = self.draft(pick.sequence, running, self._max_rows - num_rows) or ()
            num_rows += len(draft_ids)
            drafted.append(pick._replace(draft_ids=draft_ids))
        return drafted

    def draft(
        self, sequence: Sequence, running: Mapping[int, Sequence], max_rows: int = MAX_DRAFT_TOKENS
    ) -> tuple[int, ...] | None:
        """The draft tokens that pay after the sequence's known ones, at most `max_rows`; None while a mask that
        decides about them is not there."""
        if self._forced is None and len(running) > self._most_sequences:
            return ()
        limit = MAX_DRAFT_TOKENS if self._forced is None else self._forced
        limit = min(limit, max_rows, sequence.num_free_positions)
        if sequence.num_likely:
            limit = min(limit, MAX_STEP_LIKELY // sequence.num_likely - 1)
        if limit <= 0:
            return ()
        if not _knows_mask(sequence):
            return None
        drafter = self._drafter_of(sequence, running)
        step_s, row_s = self._seconds(len(sequence.token_ids))
        probability = num_expected = 1.0
        draft_ids: list[int] = []
        while len(draft_ids) < limit and (found := drafter.draft(sequence.token_ids, draft_ids)):
            probability *= found.probability
            pays = probability >= MIN_PROBABILITY and probability * step_s > num_expected * row_s
            if self._forced is None and not pays:
                break
            if not is_allowed(sequence.mask_after(tuple(draft_ids)), found.token_id):
                break  # it cannot be drawn there
            try:
                if not sequence.finds_mask((*draft_ids, found.token_id)):
                    return None
            except RequestError:
                break  # the request ends if this token is drawn, and not before
            draft_ids.append(found.token_id)
            step_s += row_s
            num_expected += probability
        return tuple(draft_ids)

    def _drafter_of(self, sequence: Sequence, running: Mapping[int, Sequence]) -> PromptLookup:
        if sequence.id not in self._drafters:
            self._drafters = {i: d for i, d in self._drafters.items() if i in running}
            self._drafters[sequence.id] = self._new_drafter(sequence)
        return self._drafters[sequence.id]

    def _seconds(self, num_tokens: int) -> tuple[float, float]:
        """What all stages take for a step with the last of so many tokens, and what a row adds."""
        one = StepSize().with_slice(num_tokens - 1, 1, 1)
        two = StepSize().with_slice(num_tokens - 1, 2, 2)
        step_s, longer_s = (sum(cost.seconds(size) for cost in self._costs) for size in (one, two))
        return step_s, longer_s - step_s


def _knows_mask(sequence: Sequence) -> bool:
    """Whether the mask after the known tokens is there; not where it ends the request, which is told elsewhere."""
    try:
        return sequence.finds_mask()
    except RequestError:
        return False


# Longer matches are hardly better.
MAX_MATCH = 3
# How often a draft token is right, by the length of the match, before it is measured.
_PRIORS = (0.0, 0.2, 0.4, 0.6)
# The weight of the newest measurement: about the last 16 count.
_NEWEST = 1 / 16
# Tokens that are learned in one call: all requests wait while the engine learns a prompt.
MAX_LEARNED = 256


class PromptLookup:
    """Drafts what followed the latest earlier place of a sequence's last tokens, at most MAX_MATCH of them.

    Every known token tells whether it would have been drafted, so the acceptance is measured for this very text.
    Time and memory are constant per token.
    """

    def __init__(self, _sequence: Sequence | None = None) -> None:
        self._followers: dict[tuple[int, ...], int] = {}
        self._hit_rates = list(_PRIORS)
        self._num_learned = 0

    def draft(self, token_ids: Seq[int], draft_ids: Seq[int]) -> DraftToken | None:
        """What may follow `token_ids` and then `draft_ids`, if anything. token_ids only ever grows."""
        self._learn(token_ids)
        if self._num_learned < len(token_ids):
            return None
        tail = (*token_ids[-MAX_MATCH:], *draft_ids)[-MAX_MATCH:]
        match = self._longest_match(tail)
        if not match:
            return None
        return DraftToken(self._followers[match], self._hit_rates[len(match)])

    def _learn(self, token_ids: Seq[int]) -> None:
        """Learn of the next tokens whether each would have been drafted, and what followed what."""
        until = min(len(token_ids), self._num_learned + MAX_LEARNED)
        for place in range(self._num_learned, until):
            token_id = token_ids[place]
            before = tuple(token_ids[max(0, place - MAX_MATCH) : place])
            if match := self._longest_match(before):
                newest = 1.0 if self._followers[match] == token_id else 0.0
                self._hit_rates[len(match)] += (newest - self._hit_rates[len(match)]) * _NEWEST
            for skipped in range(len(before)):
                self._followers[before[skipped:]] = token_id
        self._num_learned = until

    def _longest_match(self, tail: tuple[int, ...]) -> tuple[int, ...]:
        """The longest end of `tail` that was seen before; empty if none was."""
        return next((tail[i:] for i in range(len(tail)) if tail[i:] in self._followers), ())
