"""Composes a step: which sequences are in it, and how many tokens of each.

Decodes are spread evenly over the m slots: a step takes 1/m of all decoding sequences (those in flight count as
well), those that returned first, and leaves the rest to the next slot. Tokens of prompts and replays then fill the
step up to a budget: the configured `prefill_chunk`, or, if it is automatic,

- 1/(3m) of the pending tokens (guided self-scheduling, Polychronopoulos and Kuck 1987), so that one long prompt
  makes enough chunks for every stage, and many short ones are not all put into the first slot;
- never more than the predicted time allows, so that decodes in the same step are not delayed for long.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from operator import itemgetter
from typing import NamedTuple

from ppserve.core.cost_model import StageCost, StepSize
from ppserve.core.scheduling.sequence import Sequence

# Tokens. Smaller chunks are not worth a step of their own, and prompts of at most so many are short.
MIN_CHUNK = 64
# Tokens. Without a cost model, the only bound on how long a prompt delays decodes.
MAX_CHUNK_BESIDE_DECODES = 256
# Tokens of prompts that a step with decodes takes at least, even if it is predicted to be too slow.
MIN_CHUNK_BESIDE_DECODES = 16
# The rounds of all slots over which pending tokens are spread.
SPREAD_ROUNDS = 3
# Bounds of the predicted time of a step with prompt tokens: while nothing decodes, and beside decodes. There it
# may also take so many times as long as its decodes alone.
MAX_SECONDS_ALONE = 0.16
MAX_SECONDS_BESIDE_DECODES = 0.08
MAX_STRETCH = 2.0


class Pick(NamedTuple):
    """A sequence of a step."""

    sequence: Sequence
    num_tokens: int
    """Of its known ones."""
    draft_ids: tuple[int, ...] = ()


def slowest_s(costs: Seq[StageCost], size: StepSize) -> float:
    """What a step costs on the slowest stage; zero where no stage's costs are known."""
    return max((cost.seconds(size) for cost in costs), default=0.0)


class Composer:
    """Chooses the sequences of a step. Changes nothing; the scheduler makes the slices."""

    def __init__(self, prefill_chunk: int | None, max_auto_chunk: int, costs: Seq[StageCost] = ()) -> None:
        """prefill_chunk: prompt tokens per step; None = automatic, up to `max_auto_chunk`."""
        self._prefill_chunk = prefill_chunk
        self._max_auto_chunk = max_auto_chunk
        # A configured chunk is exact, whatever it costs.
        self._costs = costs if prefill_chunk is None else ()

    def compose(self, ready: Iterable[Sequence], num_running: int, num_slots: int) -> list[Pick]:
        """The sequences of the next step; empty when there is nothing to do.

        ready: the running sequences with known tokens to schedule, in order of their turn. Those with one token
        decode; those with more compute a prompt, or are computed again after a loss.
        """
        ready = list(ready)
        decoding = [sequence for sequence in ready if sequence.remaining == 1 and sequence.is_ready]
        filling = [sequence for sequence in ready if sequence.remaining > 1 and sequence.is_ready]
        num_decoding = num_running - (len(ready) - len(decoding))  # those in flight too
        picks = [Pick(sequence, 1) for sequence in decoding[: -(-num_decoding // num_slots)]]
        if prompts := in_turns(filling):
            self._fill(picks, prompts, num_decoding > 0, num_slots)
        return picks

    def _fill(self, picks: list[Pick], prompts: list[Sequence], beside_decodes: bool, num_slots: int) -> None:
        size = StepSize()
        for pick in picks:
            size = _joined(size, pick.sequence, pick.num_tokens)
        budget = self._token_budget(prompts, beside_decodes, num_slots)
        limit_s, at_least = self._time_limit_s(size, beside_decodes), MIN_CHUNK_BESIDE_DECODES
        for sequence in prompts:
            most = min(sequence.remaining, budget)
            num_tokens = max(self._most_within(limit_s, size, sequence, most), min(at_least, most))
            if num_tokens == 0:
                return
            picks.append(Pick(sequence, num_tokens))
            size = _joined(size, sequence, num_tokens)
            budget, at_least = budget - num_tokens, 0

    def _token_budget(self, prompts: list[Sequence], beside_decodes: bool, num_slots: int) -> int:
        """How many prompt tokens the step may take, apart from the bound on its time."""
        if self._prefill_chunk is not None:
            return self._prefill_chunk
        least, most = MIN_CHUNK, self._max_auto_chunk
        if beside_decodes:
            least, most = MIN_CHUNK_BESIDE_DECODES, min(most, MAX_CHUNK_BESIDE_DECODES)
        if num_slots == 1:
            return most
        pending = sum(sequence.remaining for sequence in prompts)
        return min(most, max(least, -(-pending // (SPREAD_ROUNDS * num_slots))))

    def _time_limit_s(self, decodes: StepSize, beside_decodes: bool) -> float:
        if not self._costs:
            return math.inf
        if not beside_decodes:
            return MAX_SECONDS_ALONE
        stretched_s = MAX_STRETCH * slowest_s(self._costs, decodes) if decodes.rows else 0.0
        return max(MAX_SECONDS_BESIDE_DECODES, stretched_s)

    def _most_within(self, limit_s: float, size: StepSize, sequence: Sequence, most: int) -> int:
        """How many tokens of a sequence, up to `most`, a step can take that is predicted to end in time."""

        def seconds(num_tokens: int) -> float:
            return slowest_s(self._costs, _joined(size, sequence, num_tokens))

        return most if seconds(most) <= limit_s else bisect_right(range(1, most), limit_s, key=seconds)


def _joined(size: StepSize, sequence: Sequence, num_tokens: int) -> StepSize:
    """The size of the step with the next `num_tokens` tokens of a sequence. The LM head computes every row of a
    scored prompt, otherwise only the row of the last known token."""
    sampled = num_tokens if sequence.wants_scores else int(num_tokens >= sequence.remaining)
    return size.with_slice(sequence.scheduled, num_tokens, sampled)


def in_turns(filling: Iterable[Sequence]) -> list[Sequence]:
    """One prompt of each caller, then the second of each, and so on; in each round those with at most MIN_CHUNK
    tokens left go first. So a caller's first prompt waits for at most one prompt of every other caller. Prompts of
    one caller keep their order."""
    turns: Counter[str] = Counter()
    ranked = []
    for sequence in filling:
        caller = sequence.request.caller
        ranked.append(((turns[caller], sequence.remaining > MIN_CHUNK), sequence))
        turns[caller] += 1
    return [sequence for _, sequence in sorted(ranked, key=itemgetter(0))]
