"""From logits to a token: a pure function of (seed, index, position, logits).

There is no generator state anywhere: the one uniform number that a draw needs is a hash of its key, and
the token is found by inverting the cumulative distribution over the surviving ids in id order. So a token
does not depend on what else was drawn, on which stage, or on what is drawn again after a loss.

Order of application: logit_bias; repetition, frequency and presence penalties; banned ids; temperature;
top_k; top_p; min_p. The surviving set is that of transformers' logits processors; where probabilities tie
at the edge of top_p, and for greedy, the lower id wins (transformers leaves that to its sort).
Log-probabilities are the model's own: of the raw logits, before any of the above.

V vocabulary, v consecutive ids of it, R rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.core.plan import Draw, Drawn, Scored, Slice, StepPlan, TokenLogprobs
from ppserve.core.request import SamplingParams
from ppserve.model.sampling_kernels import draw, greatest, is_finite, log_normalizer, most_likely

Floats = NDArray[np.float32]

GREATEST = float(np.finfo(np.float32).max)
"""Of scores: beyond it `sampling_kernels` has no bins."""

_MASK = (1 << 64) - 1


def read_logits(plan: StepPlan, pieces_RV: Iterator[torch.Tensor]) -> tuple[tuple[Drawn, ...], tuple[Scored, ...]]:
    """Draw from and score a plan's logits. pieces_RV: float32 rows in the order of `StepInputs.read_rows`,
    in pieces of any size."""
    rows = (row_V for piece_RV in pieces_RV for row_V in piece_RV.cpu().numpy())
    drawn = tuple(
        draw_token(s.sequence_id, draw, position, next(rows)) for s in plan.slices for position, draw in s.draws
    )
    scored = tuple(score(s, rows) for s in plan.slices if s.targets)
    return drawn, scored


def score(s: Slice, rows: Iterator[Floats]) -> Scored:
    logprobs = tuple(token_logprobs(next(rows), target, s.num_prompt_logprobs) for target in s.targets)
    return Scored(s.sequence_id, logprobs)


def draw_token(sequence_id: int, wanted: Draw, position: int, logits_V: Floats) -> Drawn:
    """Draw the token at absolute `position` of a sequence."""
    if not is_finite(logits_V):
        return Drawn(sequence_id, None)
    token_id = draw_from(adjusted(logits_V, wanted, position), wanted, position)
    if token_id < 0:
        return Drawn(sequence_id, None)
    if wanted.num_logprobs is None:
        return Drawn(sequence_id, token_id)
    return Drawn(sequence_id, token_id, token_logprobs(logits_V, token_id, wanted.num_logprobs))


def draw_from(scores_V: Floats, wanted: Draw, position: int) -> int:
    """An id by its score; -1 where none is left."""
    params = wanted.params
    if params.temperature == 0:
        return int(greatest(scores_V))
    where = uniform(params.seed, wanted.index, position)
    return int(draw(scores_V, np.float32(params.temperature), params.top_k, params.top_p, params.min_p, where))


def token_logprobs(logits_V: Floats, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probability of one token, and of the `num_top` most likely (ties: lower id first)."""
    normalizer = log_normalizer(logits_V)
    top = most_likely(logits_V, min(num_top, len(logits_V))) if num_top else ()
    alternatives = tuple((int(i), float(logits_V[i]) - normalizer) for i in top)
    return TokenLogprobs(float(logits_V[token_id]) - normalizer, alternatives)


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) for one draw: the key hashed by SplitMix64's finalizer (Steele et al., 2014)."""
    state = 0
    for part in (seed, index, position):
        state = _mix((state + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK)
    return (state >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def adjusted(logits_v: Floats, wanted: Draw, position: int, first: int = 0) -> Floats:
    """The scores to draw from: bias, penalties and bans applied; the logits themselves when there are none.

    logits_v: of consecutive ids, of which `first` is the first.
    """
    params = wanted.params
    banned = wanted.banned if position < wanted.banned_before else ()
    if not (params.logit_bias or params.needs_history or banned):
        return logits_v
    scores_v, size = logits_v.copy(), len(logits_v)
    for token_id, bias in params.logit_bias:
        if 0 <= token_id - first < size:
            scores_v[token_id - first] += np.float32(bias)
    if params.needs_history:
        prompt, output = (_within(ids, first, size) for ids in (wanted.prompt_ids, wanted.output_ids))
        _penalize(scores_v, params, prompt, output)
    scores_v[_within(banned, first, size)] = -math.inf
    return scores_v


def _within(token_ids: tuple[int, ...], first: int, size: int) -> NDArray[np.int64]:
    """Those of `size` ids from `first` on, counted from there."""
    places = np.asarray(token_ids, np.int64) - first
    return places[(places >= 0) & (places < size)]


def _penalize(
    scores_v: Floats, params: SamplingParams, prompt: NDArray[np.int64], output: NDArray[np.int64]
) -> None:
    """Repetition looks at prompt and output, frequency and presence at the output alone."""
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate([prompt, output]))
        scores, penalty = scores_v[seen], np.float32(params.repetition_penalty)
        with np.errstate(over="ignore"):
            scores = np.where(scores < 0, scores * penalty, scores / penalty)
        scores_v[seen] = np.clip(scores, -GREATEST, GREATEST)
    ids, times = np.unique(output, return_counts=True)
    scores_v[ids] -= np.float32(params.frequency_penalty) * times.astype(np.float32)
    scores_v[ids] -= np.float32(params.presence_penalty)
