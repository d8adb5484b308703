"""Draw a token from logits: a pure function of (seed, index, position, logits).

There is no generator state. A draw uses one uniform number, which is a hash of (seed, index, position). The token
is found by inverting the cumulative distribution over the surviving ids, in the order of ids. So a token does not
depend on other draws, on the stage, or on what is drawn again after a loss.

The options are applied in this order: logit_bias; repetition, frequency and presence penalties; banned ids and
those that a mask forbids; temperature; top_k; top_p; min_p. The surviving ids are those of transformers' logits
processors. If probabilities are equal at the edge of top_p, or in a greedy draw, the lower id wins (in
transformers its sort decides). Log-probabilities are those of the raw logits.

Each tensor rank has the logits of its own ids. For a greedy draw, the ranks exchange their best scores and ids.
For everything else, they exchange whole rows, because sums made by several ranks would change bits.

V vocabulary, v consecutive ids of it, R rows, T tensor ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.core.architecture import Cut
from ppserve.core.plan import Draw, Drawn, Scored, StepPlan, TokenLogprobs
from ppserve.core.request import SamplingParams
from ppserve.model.backend import Results
from ppserve.model.inputs import Gather
from ppserve.model.sampling_kernels import (
    allowed_ids,
    draw,
    forbid,
    greatest,
    is_finite,
    log_normalizer,
    most_likely,
    num_allowed,
)

Floats = NDArray[np.float32]

GREATEST = float(np.finfo(np.float32).max)
"""The greatest score that penalties may make: for greater ones `sampling_kernels` has no bins."""

_MASK = (1 << 64) - 1

_FEW_OF = 8
"""If fewer ids than the vocabulary's size divided by this are allowed, only their scores are looked at."""
_MANY = 64
"""If more of the most likely tokens than this are asked for, they are found by sorting all."""


@dataclass(frozen=True, slots=True)
class ReadRow:
    """The purpose for which a row of logits is read: a draw, the log-probability of a target, or none
    (padding)."""

    sequence_id: int | None = None
    draw: Draw | None = None
    position: int = 0  # of the token that is drawn
    target: int | None = None
    num_top: int | None = None
    """How many of the most likely tokens are asked for; None: no log-probabilities are."""

    @property
    def needs_best_only(self) -> bool:
        """Whether nothing is needed of the row but the id of the greatest score."""
        return self.draw is not None and self.draw.params.temperature == 0 and self.num_top is None


def rows_read(plan: StepPlan) -> list[ReadRow]:
    """Return the rows of a step that are read, in the order of `StepRows.read_rows`."""
    drawn = [
        ReadRow(s.sequence_id, draw, at, num_top=draw.num_logprobs) for s in plan.slices for at, draw in s.draws
    ]
    scored = [
        ReadRow(s.sequence_id, target=t, num_top=s.num_prompt_logprobs) for s in plan.slices for t in s.targets
    ]
    return drawn + scored


def read_logits(plan: StepPlan, parts_Rv: Iterable[torch.Tensor], gather: Gather, vocabulary: Cut) -> Results:
    """Draw from logits, and score them. All ranks of the stage must call this; only the first has results.
    parts_Rv: in the order of `StepRows.read_rows`."""
    rows = iter(rows_read(plan))
    drawn = list[Drawn]()
    logprobs = list[TokenLogprobs]()
    for own_Rv in parts_Rv:
        here = list(islice(rows, len(own_Rv)))
        few = [i for i, row in enumerate(here) if row.needs_best_only and len(vocabulary.widths) > 1]
        best = dict(zip(few, _best_ids([here[i] for i in few], own_Rv[few], gather, vocabulary), strict=True))
        whole = [i for i in range(len(here)) if i not in best]
        logits = dict(zip(whole, gather.all(own_Rv[whole] if few else own_Rv, vocabulary).numpy(), strict=True))
        for i, row in enumerate(here if vocabulary.rank == 0 else ()):
            if row.target is not None:
                logprobs.append(token_logprobs(logits[i], row.target, row.num_top or 0))
            elif i in best:
                drawn.append(Drawn(row.sequence_id, best[i]))
            elif row.draw is not None:
                drawn.append(draw_token(row.sequence_id, row.draw, row.position, logits[i]))
    left = iter(logprobs)
    scored = (Scored(s.sequence_id, tuple(islice(left, len(s.targets)))) for s in plan.slices if s.targets)
    return tuple(drawn), tuple(scored) if vocabulary.rank == 0 else ()


def _best_ids(rows: list[ReadRow], own_Rv: torch.Tensor, gather: Gather, vocabulary: Cut) -> list[int | None]:
    """Return the id of each row's greatest score, and of equal ones the lowest. None: no id is left, or the logits
    are not finite."""
    if not rows:
        return []
    own_R2 = np.empty((len(rows), 2))  # a rank's best score and its id, exact in float64
    for row, logits_v, best in zip(rows, own_Rv.numpy(), own_R2, strict=True):
        assert row.draw is not None
        first = vocabulary.own.start
        ids_n, scores_n = _candidates(adjusted(logits_v, row.draw, row.position, first), row.draw.mask, first)
        place = int(greatest(scores_n))
        best[:] = (
            (scores_n[place] if place >= 0 else -np.inf) if is_finite(logits_v) else np.nan,
            first + place if ids_n is None or place < 0 else ids_n[place],
        )
    count = len(vocabulary.widths)
    pairs = Cut((2,) * count, vocabulary.rank)
    all_RT2 = gather.all(torch.from_numpy(own_R2), pairs).numpy().reshape(len(rows), count, 2)
    where_R = all_RT2[:, :, 0].argmax(1)  # of equal scores the first; a NaN counts as the greatest
    best_R2 = all_RT2[np.arange(len(rows)), where_R]
    return [int(token_id) if np.isfinite(best) else None for best, token_id in best_R2]


def draw_token(sequence_id: int | None, wanted: Draw, position: int, logits_V: Floats) -> Drawn:
    """Draw the token at `position` of a sequence, counted from the beginning of its prompt."""
    if not is_finite(logits_V):
        return Drawn(sequence_id, None)
    ids_n, scores_n = _candidates(adjusted(logits_V, wanted, position), wanted.mask)
    params = wanted.params
    if params.temperature == 0:
        place = int(greatest(scores_n))
    else:
        where = uniform(params.seed, wanted.index, position)
        temperature = np.float32(params.temperature)
        place = int(draw(scores_n, temperature, params.top_k, params.top_p, params.min_p, where))
    if place < 0:
        return Drawn(sequence_id, None)
    token_id = place if ids_n is None else int(ids_n[place])
    if wanted.num_logprobs is None:
        return Drawn(sequence_id, token_id)
    return Drawn(sequence_id, token_id, token_logprobs(logits_V, token_id, wanted.num_logprobs))


def token_logprobs(logits_V: Floats, token_id: int, num_top: int) -> TokenLogprobs:
    """Return the log-probabilities of one token and of the `num_top` most likely ones (of equal ones, the lower id
    first)."""
    normalizer = log_normalizer(logits_V)
    top: NDArray[np.int64] | tuple[int, ...] = ()
    if num_top > _MANY:
        top = np.argsort(-logits_V, kind="stable")[:num_top]
    elif num_top:
        top = most_likely(logits_V, min(num_top, len(logits_V)))
    alternatives = tuple((int(i), float(logits_V[i]) - normalizer) for i in top)
    return TokenLogprobs(float(logits_V[token_id]) - normalizer, alternatives)


def uniform(seed: int, index: int, position: int) -> float:
    """Return the number in [0, 1) of a draw, made by SplitMix64's finalizer (Steele et al., 2014)."""
    state = 0
    for part in (seed, index, position):
        state = _mix((state + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK)
    return (state >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def adjusted(logits_v: Floats, wanted: Draw, position: int, first: int = 0) -> Floats:
    """Return the scores from which a token is drawn: logits after biases, penalties and bans. logits_v: those of
    the ids from `first` on."""
    params = wanted.params
    banned = wanted.banned if position < wanted.banned_before else ()
    if not (wanted.biases or params.needs_history or banned):
        return logits_v
    scores_v, size = logits_v.copy(), len(logits_v)
    if wanted.biases:
        biased, biases = unpacked_biases(wanted.biases)
        is_own = (biased >= first) & (biased < first + size)
        scores_v[biased[is_own] - first] += biases[is_own]
    if params.needs_history:
        prompt = _within(unpacked_ids(wanted.prompt_ids), first, size)
        output = _within(unpacked_ids(wanted.output_ids), first, size)
        _penalize(scores_v, params, prompt, output)
    scores_v[_within(np.asarray(banned, np.int64), first, size)] = -math.inf
    return scores_v


def _candidates(scores_v: Floats, mask: bytes | None, first: int = 0) -> tuple[NDArray[np.int64] | None, Floats]:
    """Apply a mask. Return the ids of the scores that remain, and the scores. None in place of the ids: these are
    all from `first` on.

    If few ids are allowed, only their scores are returned, because that is faster. The token that is drawn is the
    same as from all scores with -inf for the forbidden ids: what is added up, in the order of ids, is the same.
    """
    if mask is None:
        return None, scores_v
    mask_B = np.frombuffer(mask, np.uint8)
    if num_allowed(mask_B) * _FEW_OF < len(scores_v):
        ids_n = allowed_ids(mask_B, first, first + len(scores_v))
        return ids_n, scores_v[ids_n - first]
    masked_v = scores_v.copy()
    forbid(masked_v, mask_B, first)
    return None, masked_v


def unpacked_ids(packed: bytes) -> NDArray[np.int64]:
    """Return the ids that `plan.packed_ids` packed."""
    return np.frombuffer(packed, "<i4").astype(np.int64)


def unpacked_biases(packed: bytes) -> tuple[NDArray[np.int64], Floats]:
    """Return the ids and the biases that `plan.packed_biases` packed."""
    pairs = np.frombuffer(packed, _BIAS)
    return pairs["id"].astype(np.int64), pairs["bias"].astype(np.float32)


_BIAS = np.dtype([("id", "<i4"), ("bias", "<f4")])


def _within(token_ids: NDArray[np.int64], first: int, size: int) -> NDArray[np.int64]:
    """Return where those of the ids that lie among the `size` ids from `first` on stand in these."""
    places = token_ids - first
    return places[(places >= 0) & (places < size)]


def _penalize(
    scores_v: Floats, params: SamplingParams, prompt: NDArray[np.int64], output: NDArray[np.int64]
) -> None:
    """Apply the penalties in place. Repetition counts the tokens of prompt and output, frequency and presence only
    those of the output."""
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate([prompt, output]))
        scores = scores_v[seen]
        penalty = np.float32(params.repetition_penalty)
        with np.errstate(over="ignore"):
            scores = np.where(scores < 0, scores * penalty, scores / penalty)
        scores_v[seen] = np.clip(scores, -GREATEST, GREATEST)
    ids, times = np.unique(output, return_counts=True)
    scores_v[ids] -= np.float32(params.frequency_penalty) * times.astype(np.float32)
    scores_v[ids] -= np.float32(params.presence_penalty)
