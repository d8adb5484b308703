"""Composes a step: which sequences are in it, and how many tokens of each.

Decodes are spread evenly over the m slots: a step takes 1/m of all decoding sequences (those in flight count as
well), those that returned first, and leaves the rest to the next slot. Tokens of prompts and replays then fill the
step up to a budget:

- the configured `prefill_chunk`; if it is automatic,
- 1/(2m) of the pending tokens (guided self-scheduling, Polychronopoulos and Kuck 1987), so that one long prompt
  makes enough chunks for every stage, and many short ones are not all put into the first slot;
- beside decodes and with a cost model only 1/(3m) of them, in smaller chunks: when steps take unequal times,
  stages wait for each other (simulated with 2 equal CPU-like stages: 6% more tokens per second than with chunks
  of 64);
- never more than the predicted time allows, so that decodes in the same step are not delayed for long.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ppserve.core.cost_model import StepSize
from ppserve.core.scheduling.config import MAX_PROMPT_TOKENS_PER_STEP
from ppserve.core.scheduling.fairness import in_turns
from ppserve.core.scheduling.sequence import Sequence

# Tokens. Smaller chunks are not worth a step of their own, and prompts of at most so many are short.
MIN_CHUNK = 64
# Tokens. Without a cost model, the only bound on how long a prompt delays decodes.
MAX_CHUNK_BESIDE_DECODES = 256
# Tokens of a prompt that a step takes even if it is predicted to be too slow.
MIN_TIMED_CHUNK = 8
# Beside decodes: the smallest chunk in tokens, and over how many rounds of all slots the pending tokens are
# spread.
MIN_SPREAD_CHUNK = 8
SPREAD_ROUNDS = 3
# How many times as long as its decodes alone a step may take before it delays the steps after it noticeably.
MAX_STEP_STRETCH = 1.25


class Pick(NamedTuple):
    """A sequence of a step."""

    sequence: Sequence
    num_tokens: int
    """Of its known ones."""
    draft_ids: tuple[int, ...] = ()


class CostModel(Protocol):
    """Predicts what a step costs, in seconds. Zero before anything was observed."""

    def predict(self, size: StepSize) -> float:
        """On the slowest stage."""
        ...

    def predict_each(self, size: StepSize) -> Seq[float]:
        """On every stage."""
        ...


@dataclass(frozen=True, slots=True)
class StepLimits:
    """prefill_chunk: prompt tokens per step, None = automatic, up to max_auto_chunk.

    The other three need a cost model. They bound the predicted time of a step with prompt tokens: by seconds_alone
    when nothing decodes; else by seconds_beside_decodes or by `stretch` times the predicted time of the decodes
    alone, whichever is longer.
    """

    prefill_chunk: int | None = None
    max_auto_chunk: int = MAX_PROMPT_TOKENS_PER_STEP
    seconds_beside_decodes: float = 0.08
    seconds_alone: float = 0.16
    stretch: float = 2.0


def joined(size: StepSize, sequence: Sequence, num_tokens: int) -> StepSize:
    """The size of the step with the next `num_tokens` tokens of a sequence.

    The LM head computes every row of a scored prompt, otherwise only the row of the last known token.
    """
    sampled = num_tokens if sequence.wants_scores else int(num_tokens >= sequence.remaining)
    return size.with_slice(sequence.scheduled, num_tokens, sampled)


class Composer:
    """Chooses the slices of a step. Changes nothing; the scheduler makes the slices."""

    def __init__(self, limits: StepLimits, costs: CostModel | None = None) -> None:
        self.limits = limits
        self.costs = costs

    def compose(
        self, returned: Iterable[Sequence], num_decoding: int, filling: Iterable[Sequence], microbatches: int
    ) -> list[Pick]:
        """The sequences of the next step; empty when there is nothing to do.

        returned: decodes that are ready, oldest return first. num_decoding: all decodes, those in flight included.
        filling: sequences with prompt or replay tokens to compute, in order of admission.
        """
        share = -(-num_decoding // microbatches)
        picks = [Pick(sequence, 1) for sequence, _ in zip(returned, range(share), strict=False)]
        if prompts := in_turns(filling, short=MIN_CHUNK):
            self._fill(picks, prompts, bool(num_decoding), microbatches)
        return picks

    def _fill(
        self, picks: list[Pick], prompts: list[Sequence], beside_decodes: bool, microbatches: int
    ) -> None:
        time = self._time_budget(picks, beside_decodes)
        budget = self._token_budget(prompts, time, beside_decodes, microbatches)
        for sequence in prompts:
            num_tokens = min(sequence.remaining, budget)
            if time is not None:
                num_tokens = time.take(sequence, num_tokens, at_least=0 if time.used else MIN_TIMED_CHUNK)
            if num_tokens == 0:
                return
            picks.append(Pick(sequence, num_tokens))
            budget -= num_tokens
            if budget == 0:
                return

    def _token_budget(
        self, prompts: list[Sequence], time: _TimeBudget | None, beside_decodes: bool, microbatches: int
    ) -> int:
        """How many prompt tokens the step may take, apart from the bound on its time."""
        if self.limits.prefill_chunk is not None:
            return self.limits.prefill_chunk
        most = min(MAX_CHUNK_BESIDE_DECODES, self.limits.max_auto_chunk)
        if not beside_decodes:
            most = self.limits.max_auto_chunk
        if microbatches == 1:
            return most
        pending = sum(sequence.remaining for sequence in prompts)
        if time is not None and time.has_decodes:
            spread = -(-pending // (SPREAD_ROUNDS * microbatches))
            return min(most, max(spread, MIN_SPREAD_CHUNK, time.most_within_stretch(prompts[0])))
        return max(MIN_CHUNK, min(most, -(-pending // (2 * microbatches))))

    def _time_budget(self, picks: list[Pick], beside_decodes: bool) -> _TimeBudget | None:
        """The bound on the step's predicted time; None where the time is not bounded."""
        if self.costs is None or self.limits.prefill_chunk is not None:
            return None
        size = StepSize()
        for sequence, num_tokens, _ in picks:
            size = joined(size, sequence, num_tokens)
        allowed_s = self.limits.seconds_alone
        if beside_decodes:
            allowed_s = self.limits.seconds_beside_decodes
            if size.rows:
                allowed_s = max(allowed_s, self.limits.stretch * self.costs.predict(size))
        return _TimeBudget(self.costs, size, allowed_s)


class _TimeBudget:
    """How much prompt fits into a step of a predicted time. used: whether the step has taken prompt tokens."""

    def __init__(self, costs: CostModel, size: StepSize, allowed_s: float) -> None:
        self.used = False
        self.has_decodes = size.rows > 0
        self._costs = costs
        self._size = size
        self._allowed_s = allowed_s

    def most_within_stretch(self, sequence: Sequence) -> int:
        """The most tokens of a sequence with which the step takes at most MAX_STEP_STRETCH times as long."""
        limit_s = MAX_STEP_STRETCH * self._costs.predict(self._size)
        return self._most(sequence, min(sequence.remaining, MAX_CHUNK_BESIDE_DECODES), limit_s)

    def take(self, sequence: Sequence, most: int, at_least: int) -> int:
        """Adds as many tokens of a sequence, up to `most`, as the time allows, and says how many.

        at_least: added even if the step takes too long, so that prompts progress beside any number of decodes.
        """
        num_tokens = max(self._most(sequence, most, self._allowed_s), min(at_least, most))
        self._size = joined(self._size, sequence, num_tokens)
        self.used = True
        return num_tokens

    def _most(self, sequence: Sequence, most: int, limit_s: float) -> int:
        """The most tokens, 0 to `most`, with which the step is predicted to take at most `limit_s`."""

        def fits(num_tokens: int) -> bool:
            return self._costs.predict(joined(self._size, sequence, num_tokens)) <= limit_s

        if fits(most):
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low
