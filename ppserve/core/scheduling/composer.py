"""What goes into one step: which sequences, and how many tokens of each.

Sequences whose tokens are all scheduled but the one just drawn ("returned") are spread evenly: a
microbatch takes its share of all such sequences, ready or in flight, oldest return first, and leaves
the rest to the next lane. The tokens of prompts (and replays) then fill the step up to a budget:

- as many as the configured `prefill_chunk`, or else
- a share of what is pending (guided self-scheduling, Polychronopoulos and Kuck 1987): 1/(2m) of it,
  so that a lone long prompt becomes enough chunks to occupy every stage and a crowd of short ones is
  not swallowed by the first lane;
- beside decodes and with a cost model, 1/(3m) of it in smaller pieces: steps that take unequal time
  leave stages waiting for each other, so prompts come as a steady trickle (simulated with 2 equal CPU-like
  stages: 6% more tokens per second than with pieces of 64);
- bounded by predicted time, so that decodes in the same step are not held up for long.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from ppserve.core.cost_model import StepSize
from ppserve.core.scheduling.config import MAX_PROMPT_TOKENS_PER_STEP
from ppserve.core.scheduling.sequence import Sequence

# Tokens. Smaller pieces than this are not worth a step of their own.
MIN_CHUNK = 64
# Tokens. Without a cost model, all that keeps decodes from waiting for a prompt.
MAX_CHUNK_BESIDE_DECODES = 256
# Tokens that a step takes of a prompt however slow the stages are predicted to be.
MIN_TIMED_CHUNK = 8
# The trickle beside decodes: its smallest piece in tokens, and over how many turns of all lanes it is spread.
MIN_SMOOTH_CHUNK = 8
SMOOTH_TURNS = 3
# A step that takes up to this many times as long is no trouble to its neighbours.
UNNOTICED = 1.25


class CostModel(Protocol):
    """Predicts what a step costs on its slowest stage, in seconds."""

    def predict(self, size: StepSize) -> float: ...


@dataclass(frozen=True, slots=True)
class StepLimits:
    """prefill_chunk: prompt tokens per step, None = automatic, up to max_auto_chunk. The rest needs a cost
    model: the predicted time of a step with prompt tokens is bounded by seconds_beside_decodes (or, where the
    decodes alone take long, by stretch times theirs), and by seconds_alone when nothing decodes.
    """

    prefill_chunk: int | None = None
    max_auto_chunk: int = MAX_PROMPT_TOKENS_PER_STEP
    seconds_beside_decodes: float = 0.08
    seconds_alone: float = 0.16
    stretch: float = 2.0


def _joined(size: StepSize, sequence: Sequence, num_tokens: int) -> StepSize:
    """The size of the step once the next `num_tokens` tokens of a sequence join.

    The LM head computes every row of a prompt that is scored, else only the row of the last known token.
    """
    sampled = num_tokens if sequence.wants_scores else int(num_tokens == sequence.remaining)
    return size.with_slice(sequence.scheduled, num_tokens, sampled)


class Composer:
    """Chooses the slices of one step. Changes nothing; the scheduler carries the choice out."""

    def __init__(self, limits: StepLimits, costs: CostModel | None = None) -> None:
        self.limits = limits
        self.costs = costs

    def compose(
        self, returned: Iterable[Sequence], num_decoding: int, filling: Iterable[Sequence], microbatches: int
    ) -> list[tuple[Sequence, int]]:
        """(sequence, tokens) pairs for the next step; empty when there is nothing to do.

        returned: ready decodes, oldest return first. num_decoding: all decodes, in flight included.
        filling: sequences with prompt or replay tokens left, in order of admission.
        """
        share = -(-num_decoding // microbatches)
        picks = [(sequence, 1) for sequence, _ in zip(returned, range(share), strict=False)]
        prompts = list(filling)
        if prompts:
            self._fill(picks, prompts, bool(num_decoding), microbatches)
        return picks

    def _fill(
        self, picks: list[tuple[Sequence, int]], prompts: list[Sequence], beside_decodes: bool, microbatches: int
    ) -> None:
        clock = self._clock(picks, beside_decodes)
        budget = self._token_budget(prompts, clock, beside_decodes, microbatches)
        for sequence in prompts:
            num_tokens = min(sequence.remaining, budget)
            if clock is not None:
                num_tokens = clock.largest(sequence, num_tokens, at_least=0 if clock.used else MIN_TIMED_CHUNK)
            if num_tokens == 0:
                return
            picks.append((sequence, num_tokens))
            budget -= num_tokens
            if budget == 0:
                return

    def _token_budget(
        self, prompts: list[Sequence], clock: _StepClock | None, beside_decodes: bool, microbatches: int
    ) -> int:
        """How many prompt tokens the step may take, time aside."""
        if self.limits.prefill_chunk is not None:
            return self.limits.prefill_chunk
        most = min(MAX_CHUNK_BESIDE_DECODES, self.limits.max_auto_chunk)
        if not beside_decodes:
            most = self.limits.max_auto_chunk
        if microbatches == 1:
            return most
        pending = sum(sequence.remaining for sequence in prompts)
        if clock is not None and clock.has_decodes:
            trickle = -(-pending // (SMOOTH_TURNS * microbatches))
            return min(most, max(trickle, MIN_SMOOTH_CHUNK, clock.unnoticed(prompts[0])))
        return max(MIN_CHUNK, min(most, -(-pending // (2 * microbatches))))

    def _clock(self, picks: list[tuple[Sequence, int]], beside_decodes: bool) -> _StepClock | None:
        """What bounds this step by predicted time; None when nothing does."""
        if self.costs is None or self.limits.prefill_chunk is not None:
            return None
        size = StepSize()
        for sequence, num_tokens in picks:
            size = _joined(size, sequence, num_tokens)
        allowed_s = self.limits.seconds_alone
        if beside_decodes:
            allowed_s = self.limits.seconds_beside_decodes
            if size.rows:
                allowed_s = max(allowed_s, self.limits.stretch * self.costs.predict(size))
        return _StepClock(self.costs, size, allowed_s)


class _StepClock:
    """Fills a step up to a predicted time. used: whether any prompt tokens were let in."""

    def __init__(self, costs: CostModel, size: StepSize, allowed_s: float) -> None:
        self.used = False
        self.has_decodes = size.rows > 0
        self._costs = costs
        self._size = size
        self._allowed_s = allowed_s

    def unnoticed(self, sequence: Sequence) -> int:
        """The most tokens of a sequence that lengthen the step so little that the next lanes hardly feel it."""
        limit_s = UNNOTICED * self._costs.predict(self._size)
        return self._most(sequence, min(sequence.remaining, MAX_CHUNK_BESIDE_DECODES), limit_s)

    def largest(self, sequence: Sequence, most: int, at_least: int) -> int:
        """The most tokens of a sequence, up to `most`, that keep the step in time; they are let in.

        at_least: let in even when too late, so that decodes never crowd prompts out.
        """
        num_tokens = max(self._most(sequence, most, self._allowed_s), min(at_least, most))
        self._size = _joined(self._size, sequence, num_tokens)
        self.used = True
        return num_tokens

    def _most(self, sequence: Sequence, most: int, limit_s: float) -> int:
        """The largest number of tokens, 0 to `most`, with which the step is predicted to take up to `limit_s`."""

        def fits(num_tokens: int) -> bool:
            return self._costs.predict(_joined(self._size, sequence, num_tokens)) <= limit_s

        if fits(most):
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low
