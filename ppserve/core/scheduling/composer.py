"""Composes a step: which sequences are in it, and how many tokens of each.

A step takes 1/m of all decoding sequences, in flight or not, where there are m slots: those that returned first.
Then tokens of prompts and replays fill it up to a budget: the configured `prefill_chunk`, or, if it is automatic,

- 1/(3m) of the pending tokens (guided self-scheduling, Polychronopoulos and Kuck 1987), so that a long prompt
  makes a chunk for every stage, and many short ones do not all go into the first slot;
- never more than the predicted time allows, so that decodes in the same step wait little.
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

# Tokens. Smaller chunks are not worth a step of their own; such prompts are short.
MIN_CHUNK = 64
# Tokens. Without a cost model, the only bound on how long a prompt delays decodes.
MAX_CHUNK_BESIDE_DECODES = 256
# Tokens of prompts that a step with decodes takes, even if it is predicted to be too slow.
MIN_CHUNK_BESIDE_DECODES = 16
# The rounds of all slots over which pending tokens are spread.
SPREAD_ROUNDS = 3
# Likely tokens that a step returns with its own. A result is one frame (`wire.MAX_FRAME_BYTES`), at 15 bytes each.
MAX_STEP_LIKELY = 1 << 20
# Bounds of the predicted time of a step with prompt tokens.
MAX_SECONDS_ALONE = 0.16
MAX_SECONDS_BESIDE_DECODES = 0.08
# Beside decodes it may also take so many times as long as they do alone.
MAX_STRETCH = 2.0


class Pick(NamedTuple):
    """A sequence of a step."""

    sequence: Sequence
    num_tokens: int
    """How many of the sequence's known tokens are computed."""
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
        decode; the others compute a prompt, or are computed again.
        """
        ready = list(ready)
        decoding = [s for s in ready if s.remaining == 1 and s.is_ready]
        filling = [s for s in ready if s.remaining > 1 and s.is_ready]
        num_decoding = num_running - (len(ready) - len(decoding))  # those in flight too
        picks = [Pick(s, 1) for s in decoding[: -(-num_decoding // num_slots)]]
        if prompts := in_turns(filling):
            self._fill(picks, prompts, num_decoding > 0, num_slots)
        return within_a_result(picks)

    def _fill(self, picks: list[Pick], prompts: list[Sequence], beside_decodes: bool, num_slots: int) -> None:
        size = StepSize()
        for pick in picks:
            size = _joined(size, pick.sequence, pick.num_tokens)
        budget = self._token_budget(prompts, beside_decodes, num_slots)
        limit_s = self._time_limit_s(size, beside_decodes)
        at_least = MIN_CHUNK_BESIDE_DECODES
        for sequence in prompts:
            most = min(sequence.remaining, budget)
            num_tokens = self._most_within(limit_s, size, sequence, most)
            num_tokens = max(num_tokens, min(at_least, most))
            if num_tokens == 0:
                return
            picks.append(Pick(sequence, num_tokens))
            size = _joined(size, sequence, num_tokens)
            budget -= num_tokens
            at_least = 0

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
        """How many tokens of a sequence, up to `most`, a step can take in time."""

        def seconds(num_tokens: int) -> float:
            return slowest_s(self._costs, _joined(size, sequence, num_tokens))

        if seconds(most) <= limit_s:
            return most
        return bisect_right(range(1, most), limit_s, key=seconds)


def within_a_result(picks: Iterable[Pick]) -> list[Pick]:
    """The picks of a step whose result is not too long. The first is always there, with one token at least."""
    left, kept = MAX_STEP_LIKELY, list[Pick]()
    for pick in picks:
        each = pick.sequence.num_likely
        num_tokens = pick.num_tokens
        if each and pick.sequence.wants_scores:
            num_tokens = min(num_tokens, max(left // each, int(not kept)))
        num_rows = num_tokens if pick.sequence.wants_scores else 1
        if num_tokens == 0 or (kept and num_rows * each > left):
            continue
        kept.append(pick._replace(num_tokens=num_tokens))
        left -= num_rows * each
    return kept


def _joined(size: StepSize, sequence: Sequence, num_tokens: int) -> StepSize:
    """The size of the step with the next `num_tokens` tokens of a sequence."""
    # The LM head computes every row of a scored prompt, else only that of the last known token.
    sampled = num_tokens if sequence.wants_scores else int(num_tokens >= sequence.remaining)
    return size.with_slice(sequence.scheduled, num_tokens, sampled)


def in_turns(filling: Iterable[Sequence]) -> list[Sequence]:
    """One prompt of each caller, then the second of each, and so on; in each round short ones first."""
    turns: Counter[str] = Counter()
    ranked = []
    for sequence in filling:
        caller = sequence.request.caller
        ranked.append(((turns[caller], sequence.remaining > MIN_CHUNK), sequence))
        turns[caller] += 1
    return [sequence for _, sequence in sorted(ranked, key=itemgetter(0))]
