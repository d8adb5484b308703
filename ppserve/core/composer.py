"""What goes into one step: which sequences, and how many tokens of each.

Sequences whose tokens are all scheduled but the one just drawn ("returned") are spread evenly: a
microbatch takes its share of all such sequences, ready or in flight, oldest return first, and leaves
the rest to the next lane. The tokens of prompts (and replays) then fill the step up to a budget:

- as many as the configured `prefill_chunk`, or else
- a share of what is pending (guided self-scheduling, Polychronopoulos and Kuck 1987): 1/(2m) of it,
  so that a lone long prompt becomes enough chunks to occupy every stage and a crowd of short ones is
  not swallowed by the first lane,
- bounded by time where a cost model is known, so that decodes in the same step are not held up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from ppserve.core.sequence import Sequence

MIN_CHUNK = 64
MAX_CHUNK_BESIDE_DECODES = 256
MAX_CHUNK_ALONE = 512
MIN_TIMED_CHUNK = 16


class CostModel(Protocol):
    """Predicts what a step costs on its slowest stage.

    num_rows: tokens in the step. context_tokens: keys read by all rows together (a row at position p
    reads p + 1). num_sampled: rows that the last stage puts through the LM head and samples.
    """

    def predict(self, num_rows: int, context_tokens: int, num_sampled: int) -> float: ...


@dataclass(frozen=True, slots=True)
class StepLimits:
    """prefill_chunk: prompt tokens per step, None = automatic. The two times bound the predicted
    seconds of a step with prompt tokens in it, beside decodes and alone; they need a cost model.
    """

    prefill_chunk: int | None = None
    seconds_beside_decodes: float = 0.1
    seconds_alone: float = 0.5


@dataclass(slots=True)
class _Load:
    """What has been put into the step so far, in the cost model's terms."""

    rows: int = 0
    context: int = 0
    sampled: int = 0

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        self.rows += num_tokens
        self.context += _context(sequence.scheduled, num_tokens)
        self.sampled += num_tokens == sequence.remaining


def _context(start: int, num_tokens: int) -> int:
    """Keys that rows start .. start + num_tokens read together."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


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
        budget = self._token_budget(sum(s.remaining for s in prompts), beside_decodes, microbatches)
        load = _Load()
        if self.costs is not None:
            for sequence, num_tokens in picks:
                load.add(sequence, num_tokens)
        for sequence in prompts:
            num_tokens = min(sequence.remaining, budget)
            if self.costs is not None and self.limits.prefill_chunk is None:
                is_first = sequence is prompts[0]
                num_tokens = self._largest_in_time(sequence, num_tokens, load, beside_decodes, is_first)
            if num_tokens == 0:
                return
            load.add(sequence, num_tokens)
            picks.append((sequence, num_tokens))
            budget -= num_tokens
            if budget == 0:
                return

    def _token_budget(self, pending: int, beside_decodes: bool, microbatches: int) -> int:
        if self.limits.prefill_chunk is not None:
            return self.limits.prefill_chunk
        most = MAX_CHUNK_BESIDE_DECODES if beside_decodes else MAX_CHUNK_ALONE
        if microbatches == 1:
            return most
        return max(MIN_CHUNK, min(most, -(-pending // (2 * microbatches))))

    def _largest_in_time(
        self, sequence: Sequence, most: int, load: _Load, beside_decodes: bool, is_first: bool
    ) -> int:
        """The most tokens up to `most` that keep the step within its time.

        Decodes never crowd prompts out: a step takes at least MIN_TIMED_CHUNK tokens of the first prompt.
        """
        costs, limits = self.costs, self.limits
        assert costs is not None
        allowed_s = limits.seconds_beside_decodes if beside_decodes else limits.seconds_alone

        def fits(num_tokens: int) -> bool:
            context = load.context + _context(sequence.scheduled, num_tokens)
            sampled = load.sampled + (num_tokens == sequence.remaining)
            return costs.predict(load.rows + num_tokens, context, sampled) <= allowed_s

        if fits(most):
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return max(low, min(MIN_TIMED_CHUNK, most)) if is_first else low
