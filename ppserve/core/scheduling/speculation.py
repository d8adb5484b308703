"""Draft tokens: tokens that are computed before they are known, as further rows of a sequence's step.

A step of few rows takes hardly longer with one row more, because most of its time goes into reading weights. So a
step that decodes may also compute guesses of the tokens that follow. Every token is still drawn from the model's
logits, as it would be without drafts. A draft token that equals the drawn one saves a step. What was computed
after a wrong one is dropped.

A draft token is added to a step if the step is then expected to yield more tokens per second:

    probability / row_s  >  tokens / step_s

    probability   of this draft token and all before it being right, by the measured acceptance
    row_s         the time that its row adds, by the cost model
    tokens        the number of tokens expected of the step so far
    step_s        the time of the step so far, by the cost model

Drafts are made only while one sequence runs, or fewer sequences than there are stages. Otherwise other sequences
fill the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from ppserve.core.cost_model import StageCost, StepSize
from ppserve.core.scheduling.composer import MAX_STEP_TOP_LOGPROBS, Pick
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.sequence import Sequence
from ppserve.core.scheduling.token_filter import is_allowed
from ppserve.errors import RequestError

# The most draft tokens of a sequence in one step.
MAX_DRAFT_TOKENS = 15
# A draft token needs this probability even where a lower one would pay: rows also take energy and the head's time,
# and a step with draft tokens cannot be sent ahead.
MIN_PROBABILITY = 0.25


class DraftToken(NamedTuple):
    """A guess of a sequence's next token."""

    token_id: int
    probability: float
    """The probability that it is right if all tokens before it are."""


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
        """Return the picks of a step with draft tokens added. If the step has tokens of prompts, none are
        added."""
        if any(sequence.num_pending > 1 or sequence.known_end for sequence, *_ in picks):
            return picks
        drafted, num_rows = [], len(picks)
        for pick in picks:
            draft_ids = self.draft(pick.sequence, running, self._max_rows - num_rows) or ()
            num_rows += len(draft_ids)
            drafted.append(pick._replace(draft_ids=draft_ids) if draft_ids else pick)
        return drafted

    def may_draft(self, num_running: int) -> bool:
        """Return whether tokens may be drafted while so many sequences run."""
        return num_running <= self._most_sequences if self._forced is None else self._forced > 0

    def draft(
        self, sequence: Sequence, running: Mapping[int, Sequence], max_rows: int = MAX_DRAFT_TOKENS
    ) -> tuple[int, ...] | None:
        """Return the draft tokens that pay after a sequence's known tokens, at most `max_rows`. Return None while
        a mask that decides about them is not there."""
        if not self.may_draft(len(running)):
            return ()
        limit = MAX_DRAFT_TOKENS if self._forced is None else self._forced
        limit = min(limit, max_rows, sequence.num_free_positions)
        if sequence.num_top_logprobs:
            limit = min(limit, MAX_STEP_TOP_LOGPROBS // sequence.num_top_logprobs - 1)
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
                break  # the mask forbids it, so it cannot be drawn
            try:
                if not sequence.find_mask((*draft_ids, found.token_id)):
                    return None
            except RequestError:
                break  # no token may follow it: the request ends if it is drawn, and not before
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
        """Return the seconds that all stages together take for a step that computes the last of `num_tokens`
        tokens, and the seconds that one row more adds."""
        one = StepSize().with_slice(num_tokens - 1, 1, 1)
        two = StepSize().with_slice(num_tokens - 1, 2, 2)
        step_s, longer_s = (sum(cost.seconds(size) for cost in self._costs) for size in (one, two))
        return step_s, longer_s - step_s


def _knows_mask(sequence: Sequence) -> bool:
    """Return whether the mask after the known tokens is there. If no token may follow them, it never is; the
    caller of `Scheduler.take_masks` learns of that."""
    try:
        return sequence.find_mask()
    except RequestError:
        return False


# Tokens that a match may have; longer ones are hardly better.
MAX_MATCH = 3
# How often a draft token is taken to be right before that is measured, by the length of the match.
_PRIORS = (0.0, 0.2, 0.4, 0.6)
# The weight of the newest observation: about the last 16 count.
_NEWEST = 1 / 16
# The most tokens that are learned in one call. All requests wait while the engine learns a prompt.
MAX_LEARNED = 256


class PromptLookup:
    """Drafts the token that followed when a sequence's last tokens (up to MAX_MATCH) occurred before.

    Each known token shows whether it would have been drafted rightly, so the acceptance is measured on this very
    text. Time and memory are constant per token.
    """

    def __init__(self, _sequence: Sequence | None = None) -> None:
        self._followers: dict[tuple[int, ...], int] = {}
        self._hit_rates = list(_PRIORS)
        self._num_learned = 0

    def draft(self, token_ids: Seq[int], draft_ids: Seq[int]) -> DraftToken | None:
        """Return a guess of the token after `token_ids` and then `draft_ids`; None: there is none. From call to
        call `token_ids` only grows."""
        self._learn(token_ids)
        if self._num_learned < len(token_ids):
            return None
        tail = (*token_ids[-MAX_MATCH:], *draft_ids)[-MAX_MATCH:]
        match = self._longest_match(tail)
        if not match:
            return None
        return DraftToken(self._followers[match], self._hit_rates[len(match)])

    def _learn(self, token_ids: Seq[int]) -> None:
        """Learn the next tokens: whether each would have been drafted, and after which tokens it came."""
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
        """Return the longest end of `tail` that has occurred before; empty if none has."""
        return next((tail[i:] for i in range(len(tail)) if tail[i:] in self._followers), ())
