"""From logits to a token: a pure function of (seed, index, position, logits).

There is no generator state anywhere: the one uniform number that a draw needs is a hash of its key, and
the token is found by inverting the cumulative distribution over the surviving ids in id order. So a token
does not depend on what else was drawn, on which stage, or on what is drawn again after a loss.

Order of application: logit_bias; repetition, frequency and presence penalties; banned ids; temperature;
top_k; top_p; min_p. The surviving set is that of transformers' logits processors; where probabilities tie
at the edge of top_p, and for greedy, the lower id wins (transformers leaves that to its sort).
Log-probabilities are the model's own: of the raw logits, before any of the above.

V vocabulary, R rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.core.plan import Draw, Drawn, Scored, Slice, StepPlan, TokenLogprobs
from ppserve.core.request import SamplingParams
from ppserve.model.cpu.sampling_kernels import draw, greatest, is_finite, log_normalizer, most_likely

Floats = NDArray[np.float32]

_MASK = (1 << 64) - 1


def read_logits(plan: StepPlan, pieces_RV: Iterator[torch.Tensor]) -> tuple[tuple[Drawn, ...], tuple[Scored, ...]]:
    """Draw from and score a plan's logits. pieces_RV: float32 rows in the order of `StepInputs.read_rows`,
    in pieces of any size."""
    rows = (row_V for piece_RV in pieces_RV for row_V in piece_RV.cpu().numpy())
    drawn = tuple(
        draw_token(s.sequence_id, draw, position, next(rows)) for s in plan.slices for position, draw in s.draws
    )
    scored = tuple(_score(s, rows) for s in plan.slices if s.targets)
    return drawn, scored


def _score(s: Slice, rows: Iterator[Floats]) -> Scored:
    logprobs = tuple(token_logprobs(next(rows), target, s.num_prompt_logprobs) for target in s.targets)
    return Scored(s.sequence_id, s.start, logprobs)


def draw_token(sequence_id: int, wanted: Draw, position: int, logits_V: Floats) -> Drawn:
    """Draw the token at absolute `position` of a sequence."""
    if not is_finite(logits_V):
        return Drawn(sequence_id, None)
    scores_V = _adjusted(logits_V, wanted, position)
    params = wanted.params
    if params.temperature == 0:
        token_id = int(greatest(scores_V))
    else:
        where = uniform(params.seed, wanted.index, position)
        limits = (np.float32(params.temperature), params.top_k, params.top_p, params.min_p)
        token_id = int(draw(scores_V, *limits, where))
    if token_id < 0:
        return Drawn(sequence_id, None)
    if wanted.num_logprobs is None:
        return Drawn(sequence_id, token_id)
    return Drawn(sequence_id, token_id, token_logprobs(logits_V, token_id, wanted.num_logprobs))


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


def _adjusted(logits_V: Floats, wanted: Draw, position: int) -> Floats:
    """The scores to draw from: bias, penalties and bans applied; the logits themselves when there are none."""
    params = wanted.params
    banned = wanted.banned if position < wanted.banned_before else ()
    if not (params.logit_bias or params.needs_history or banned):
        return logits_V
    scores_V = logits_V.copy()
    for token_id, bias in params.logit_bias:
        if token_id < len(scores_V):
            scores_V[token_id] += np.float32(bias)
    if params.needs_history:
        _penalize(scores_V, params, wanted.prompt_ids, wanted.output_ids)
    scores_V[[token_id for token_id in banned if token_id < len(scores_V)]] = -math.inf
    return scores_V


def _penalize(
    scores_V: Floats, params: SamplingParams, prompt_ids: tuple[int, ...], output_ids: tuple[int, ...]
) -> None:
    """Repetition looks at prompt and output, frequency and presence at the output alone."""
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.asarray(prompt_ids + output_ids, np.int64))
        penalty = np.float32(params.repetition_penalty)
        scores_V[seen] = np.where(scores_V[seen] < 0, scores_V[seen] * penalty, scores_V[seen] / penalty)
    counts = Counter(output_ids)
    ids = np.fromiter(counts, np.int64, len(counts))
    times = np.fromiter(counts.values(), np.float32, len(counts))
    scores_V[ids] -= np.float32(params.frequency_penalty) * times
    scores_V[ids] -= np.float32(params.presence_penalty)
