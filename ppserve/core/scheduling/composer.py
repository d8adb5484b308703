"""Composes a step: which sequences are in it, and how many tokens of each.

With m slots, a step takes 1/m of all decoding sequences (those in flight count too): those that returned first.
Then tokens of prompts and replays fill it up to a budget. This is the configured `prefill_chunk`, or, if it is
automatic,

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

# The automatic budget of a step without decodes is at least so many tokens: smaller chunks are not worth a step.
# A prompt of at most this length counts as short.
MIN_CHUNK = 64
# A step with decodes takes at most so many tokens of prompts. Without a cost model, nothing else bounds how long a
# prompt delays decodes.
MAX_CHUNK_BESIDE_DECODES = 256
# A step with decodes takes so many tokens of prompts even if it is then predicted to be too slow.
MIN_CHUNK_BESIDE_DECODES = 16
# Pending tokens are spread over so many rounds of all slots.
SPREAD_ROUNDS = 3
# The most entries (id, log-probability) that a step returns beside its own tokens. Its result is one frame
# (`wire.MAX_FRAME_BYTES`), and an entry takes up to 15 bytes.
MAX_STEP_TOP_LOGPROBS = 1 << 20
# A step with prompt tokens may take so long by prediction: without decodes, and with them.
MAX_SECONDS_ALONE = 0.16
MAX_SECONDS_BESIDE_DECODES = 0.08
# A step with decodes may also take so many times as long as its decodes alone.
MAX_STRETCH = 2.0


class Pick(NamedTuple):
    """A sequence that is put into a step."""

    sequence: Sequence
    num_tokens: int
    """How many of the sequence's pending tokens are computed."""
    draft_ids: tuple[int, ...] = ()


def slowest_s(costs: Seq[StageCost], size: StepSize) -> float:
    """Return the seconds that a step takes on the slowest stage; zero where no stage's costs are known."""
    return max((cost.seconds(size) for cost in costs), default=0.0)


class Composer:
    """Chooses the sequences of a step. It changes nothing: the scheduler makes the slices."""

    def __init__(self, prefill_chunk: int | None, max_auto_chunk: int, costs: Seq[StageCost] = ()) -> None:
        """prefill_chunk: prompt tokens per step; None = automatic, up to `max_auto_chunk`."""
        self._prefill_chunk = prefill_chunk
        self._max_auto_chunk = max_auto_chunk
        # A configured chunk is exact, whatever it costs.
        self._costs = costs if prefill_chunk is None else ()

    def compose(self, ready: Iterable[Sequence], num_running: int, num_slots: int) -> list[Pick]:
        """Return the sequences of the next step; none when there is nothing to do.

        ready: the running sequences with pending tokens, in the order in which it is their turn. A sequence with
        one pending token decodes. The others compute a prompt, or are computed again.
        """
        ready = list(ready)
        decoding = [s for s in ready if s.num_pending == 1 and s.is_ready]
        filling = [s for s in ready if s.num_pending > 1 and s.is_ready]
        num_decoding = num_running - (len(ready) - len(decoding))  # sequences in flight count too
        picks = [Pick(s, 1) for s in decoding[: -(-num_decoding // num_slots)]]
        if prompts := ordered_by_rounds(filling):
            self._fill(picks, prompts, num_decoding > 0, num_slots)
        return fitting_one_result(picks)

    def _fill(self, picks: list[Pick], prompts: list[Sequence], beside_decodes: bool, num_slots: int) -> None:
        size = StepSize()
        for pick in picks:
            size = _joined(size, pick.sequence, pick.num_tokens)
        budget = self._token_budget(prompts, beside_decodes, num_slots)
        limit_s = self._time_limit_s(size, beside_decodes)
        at_least = MIN_CHUNK_BESIDE_DECODES
        for sequence in prompts:
            most = min(sequence.num_pending, budget)
            num_tokens = self._most_within(limit_s, size, sequence, most)
            num_tokens = max(num_tokens, min(at_least, most))
            if num_tokens == 0:
                return
            picks.append(Pick(sequence, num_tokens))
            size = _joined(size, sequence, num_tokens)
            budget -= num_tokens
            at_least = 0

    def _token_budget(self, prompts: list[Sequence], beside_decodes: bool, num_slots: int) -> int:
        """Return how many prompt tokens the step may take without regard to its time."""
        if self._prefill_chunk is not None:
            return self._prefill_chunk
        least, most = MIN_CHUNK, self._max_auto_chunk
        if beside_decodes:
            least, most = MIN_CHUNK_BESIDE_DECODES, min(most, MAX_CHUNK_BESIDE_DECODES)
        if num_slots == 1:
            return most
        pending = sum(sequence.num_pending for sequence in prompts)
        return min(most, max(least, -(-pending // (SPREAD_ROUNDS * num_slots))))

    def _time_limit_s(self, decodes: StepSize, beside_decodes: bool) -> float:
        if not self._costs:
            return math.inf
        if not beside_decodes:
            return MAX_SECONDS_ALONE
        stretched_s = MAX_STRETCH * slowest_s(self._costs, decodes) if decodes.rows else 0.0
        return max(MAX_SECONDS_BESIDE_DECODES, stretched_s)

    def _most_within(self, limit_s: float, size: StepSize, sequence: Sequence, most: int) -> int:
        """Return how many tokens of a sequence, up to `most`, can join the step before it takes longer than
        `limit_s`. size: the step's size without them."""

        def seconds(num_tokens: int) -> float:
            return slowest_s(self._costs, _joined(size, sequence, num_tokens))

        if seconds(most) <= limit_s:
            return most
        return bisect_right(range(1, most), limit_s, key=seconds)


def fitting_one_result(picks: Iterable[Pick]) -> list[Pick]:
    """Shorten picks, or leave them out, until the step's result fits a frame. The first pick keeps one token at
    least."""
    left, kept = MAX_STEP_TOP_LOGPROBS, list[Pick]()
    for pick in picks:
        each = pick.sequence.num_top_logprobs
        num_tokens = pick.num_tokens
        if each and pick.sequence.wants_scores:
            num_tokens = min(num_tokens, max(left // each, int(not kept)))
        num_rows = num_tokens if pick.sequence.wants_scores else 1
        if num_tokens == 0 or (kept and num_rows * each > left):
            continue
        kept.append(pick if num_tokens == pick.num_tokens else pick._replace(num_tokens=num_tokens))
        left -= num_rows * each
    return kept


def _joined(size: StepSize, sequence: Sequence, num_tokens: int) -> StepSize:
    """Return the size of the step with the next `num_tokens` tokens of a sequence."""
    # The LM head computes every row of a prompt that is scored; else it computes only the row of the last known
    # token.
    sampled = num_tokens if sequence.wants_scores else int(num_tokens >= sequence.num_pending)
    return size.with_slice(sequence.scheduled, num_tokens, sampled)


def ordered_by_rounds(filling: Iterable[Sequence]) -> list[Sequence]:
    """Order prompts by rounds: one prompt of each caller, then the second one of each, and so on. In each round
    short prompts come first."""
    turns: Counter[str] = Counter()
    ranked = []
    for sequence in filling:
        caller = sequence.request.caller
        ranked.append(((turns[caller], sequence.num_pending > MIN_CHUNK), sequence))
        turns[caller] += 1
    return [sequence for _, sequence in sorted(ranked, key=itemgetter(0))]
