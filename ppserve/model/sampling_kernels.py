"""The loops over the vocabulary that `sampling` needs, each over one row of float32 scores in the order of ids.

Ids with a score of -inf (banned ones) are never drawn. Ids are ranked by their scores, the greatest first; equal
ones by their ids.
"""
# mypy: ignore-errors
# (numba types these functions from their arguments)

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ppserve.model.compiled.jit import inlined, kernel
from ppserve.model.compiled.lanes import (
    exp,
    fma,
    load,
    max_lanes,
    splat,
    store,
    sum_lanes,
    where_greater,
)
from ppserve.model.compiled.together import for_types

Floats = NDArray[np.float32]

_BINS = 4096
_LEAST = np.float32(-np.inf)
_PIECE = 1024
"""So many exponentials are added in float32 before their sum is added in float64."""


@kernel
def allowed_ids(mask_B: NDArray[np.uint8], begin: int, end: int) -> NDArray[np.int64]:
    """Return the ids from `begin` to `end` - 1 that a mask allows, ascending. mask_B: as in `plan.Draw.mask`."""
    ids, held = np.empty(end - begin, np.int64), 0
    for place in range(begin // 8, min((end + 7) // 8, len(mask_B))):
        bits = mask_B[place]
        if bits == 0:
            continue
        for bit in range(8):
            token_id = 8 * place + bit
            if (bits >> bit) & 1 and begin <= token_id < end:
                ids[held] = token_id
                held += 1
    return ids[:held].copy()


@kernel
def num_allowed(mask_B: NDArray[np.uint8]) -> int:
    """Return how many bits of a mask are set. The bits of a byte are added in pairs, then in fours, then all."""
    count = 0
    for bits in mask_B:
        pairs = np.uint32(bits) - ((np.uint32(bits) >> np.uint32(1)) & np.uint32(0x55))
        fours = (pairs & np.uint32(0x33)) + ((pairs >> np.uint32(2)) & np.uint32(0x33))
        count += (fours + (fours >> np.uint32(4))) & np.uint32(0x0F)
    return count


@kernel
def forbid(scores_V: Floats, mask_B: NDArray[np.uint8], first: int) -> None:
    """Set the scores that a mask forbids to -inf, byte by byte. scores_V: those of the ids from `first` on."""
    i = 0
    while i < len(scores_V):
        place, bit = (first + i) // 8, (first + i) % 8
        count = min(8 - bit, len(scores_V) - i)
        bits = mask_B[place] if place < len(mask_B) else np.uint8(0)
        if bits != 255:
            for j in range(count):
                if not (bits >> (bit + j)) & 1:
                    scores_V[i + j] = _LEAST
        i += count


@inlined
def _load_or(array, i, other):
    """Return array[i : i + 16], filled up with `other` behind the array's end."""
    if i + 16 <= len(array):
        return load(array, i)
    rest = np.empty(16, np.float32)
    rest[:] = other
    for j in range(len(array) - i):
        rest[j] = array[i + j]
    return load(rest, 0)


@inlined
def _maximum(scores_V, begin, end):
    most, whole = splat(_LEAST), begin + (end - begin) // 16 * 16
    for i in range(begin, whole, 16):
        here = load(scores_V, i)
        most = where_greater(here, most, here, most)
    greatest_here = max_lanes(most)
    for i in range(whole, end):
        greatest_here = max(greatest_here, scores_V[i])
    return greatest_here


@kernel
def is_finite(scores_V: Floats) -> bool:
    """Return whether all scores are finite. Infinity and NaN make a sum of scores times zero a NaN."""
    zero, whole = splat(np.float32(0)), len(scores_V) // 16 * 16
    total = zero
    for i in range(0, whole, 16):
        total = fma(load(scores_V, i), zero, total)
    rest = sum_lanes(total)
    for i in range(whole, len(scores_V)):
        rest += np.float32(0) * scores_V[i]
    return rest == 0


@kernel
def greatest(scores_V: Floats) -> int:
    """Return the lowest id that has the greatest score; -1 if all scores are -inf."""
    most, where = _LEAST, 0
    for begin in range(0, len(scores_V), _PIECE):
        here = _maximum(scores_V, begin, min(begin + _PIECE, len(scores_V)))
        if here > most:
            most, where = here, begin
    for i in range(where, len(scores_V)):
        if scores_V[i] == most and most > _LEAST:
            return i
    return -1


@kernel
def log_normalizer(scores_V: Floats) -> float:
    """Return log Σ exp(score). The float32 exponentials are summed in pieces, and these in float64."""
    most = _maximum(scores_V, 0, len(scores_V))
    total = 0.0
    for begin in range(0, len(scores_V), _PIECE):
        piece = splat(np.float32(0))
        for i in range(begin, min(begin + _PIECE, len(scores_V)), 16):
            piece = piece + exp(_load_or(scores_V, i, _LEAST) - splat(most))
        total += np.float64(sum_lanes(piece))
    return np.float64(most) + math.log(total)


@kernel
def most_likely(scores_V: Floats, count: int) -> NDArray[np.int64]:
    """Return the `count` first ids by rank."""
    ids = np.empty(count, np.int64)
    held = 0
    for i in range(len(scores_V)):
        if held == count and not scores_V[i] > scores_V[ids[count - 1]]:
            continue
        at = min(held, count - 1)
        while at > 0 and scores_V[i] > scores_V[ids[at - 1]]:
            ids[at] = ids[at - 1]
            at -= 1
        ids[at] = i
        held = min(held + 1, count)
    return ids


@inlined
def _weights(scores_V, most, temperature):
    """Return exp((score - most) / temperature) for all ids, filled up with zeros to whole vectors."""
    size = len(scores_V)
    weights_V = np.empty((size + 15) // 16 * 16, np.float32)
    for i in range(0, size, 16):
        scaled = (_load_or(scores_V, i, _LEAST) - splat(most)) / splat(temperature)
        store(weights_V, i, exp(scaled))
    return weights_V


class _Bins(NamedTuple):
    """Equal ranges of scores. The greatest score, `most`, is in bin 0."""

    most: float
    per_unit: float
    """How many bins a unit of score has."""


@inlined
def _bin_of(score, bins):
    return int((bins.most - score) * bins.per_unit)


@inlined
def _bins_over(scores_V, most):
    """Return bins that are spread over all finite scores. most: the greatest score."""
    least = splat(most)
    for i in range(0, len(scores_V), 16):
        here = _load_or(scores_V, i, _LEAST)
        finite = where_greater(here, splat(_LEAST), here, least)
        least = where_greater(least, finite, finite, least)
    span = np.float64(most) + np.float64(max_lanes(splat(np.float32(0)) - least))
    return _Bins(most=np.float64(most), per_unit=(_BINS - 1) / span if span > 0 else 0.0)


@inlined
def sort_by_score(scores_V, ids, held):
    """Sort the first `held` of ascending ids by rank, in place or in new memory, which is returned. Merging is
    stable: of equal scores the lower id stays first. (NumPy's sort takes seconds to compile.)"""
    others, width = np.empty(held, np.int64), 1
    while width < held:
        for begin in range(0, held, 2 * width):
            middle, end = min(begin + width, held), min(begin + 2 * width, held)
            left, right = begin, middle
            for place in range(begin, end):
                if right == end or (left < middle and scores_V[ids[left]] >= scores_V[ids[right]]):
                    others[place] = ids[left]
                    left += 1
                else:
                    others[place] = ids[right]
                    right += 1
        ids, others = others, ids
        width *= 2
    return ids


@inlined
def _members(scores_V, least, wanted_bin, bins):
    """Return, by rank, the ids in one bin whose scores are at least `least`."""
    ids, held = np.empty(len(scores_V), np.int64), 0
    for i in range(len(scores_V)):
        is_left = scores_V[i] >= least and scores_V[i] > _LEAST
        if is_left and _bin_of(np.float64(scores_V[i]), bins) == wanted_bin:
            ids[held] = i
            held += 1
    return sort_by_score(scores_V, ids, held)[:held]


@inlined
def _last_within(scores_V, weights_V, least, count, share, bins):
    """Return where a rank-ordered set ends: its last id. The set has the first `count` ids with scores of at least
    `least`. If count is 0, it has as many of them as are needed to reach this share of their weight."""
    sums = np.zeros(_BINS, np.float64)
    for i in range(len(scores_V)):
        if scores_V[i] >= least and scores_V[i] > _LEAST:
            sums[_bin_of(np.float64(scores_V[i]), bins)] += np.float32(1) if count else weights_V[i]
    limit = np.float64(count)
    for b in range(_BINS):
        limit += share * sums[b]
    above, last_bin = 0.0, 0
    for b in range(_BINS):
        if sums[b] > 0:
            last_bin = b
        if above + sums[b] >= limit:
            break
        above += sums[b]
    last = -1
    for i in _members(scores_V, least, last_bin, bins):
        if last >= 0 and above >= limit:
            break
        last = i
        above += np.float32(1) if count else weights_V[i]
    return last


@kernel
def draw(scores_V: Floats, temperature: np.float32, top_k: int, top_p: float, min_p: float, where: float) -> int:
    """Draw an id: the one at which the cumulative weight of the surviving ids, in the order of ids, exceeds
    `where` times the total. where: in [0, 1). Returns -1 if no id survives."""
    most = _maximum(scores_V, 0, len(scores_V))
    if most == _LEAST:
        return -1
    weights_V = _weights(scores_V, most, temperature)
    least, last = _LEAST, len(scores_V)
    if 0 < top_k < len(scores_V) or top_p < 1:
        bins = _bins_over(scores_V, most)
        if 0 < top_k < len(scores_V):
            least = scores_V[_last_within(scores_V, weights_V, least, top_k, 0.0, bins)]
        if top_p < 1:
            last = _last_within(scores_V, weights_V, least, 0, top_p, bins)
            least = scores_V[last]
    for i in range(len(scores_V)):
        if scores_V[i] < least or (scores_V[i] == least and i > last) or weights_V[i] < min_p:
            weights_V[i] = np.float32(0)
    return _invert(weights_V, where)


@inlined
def _invert(weights_V, where):
    """Return the first id at which the cumulative weight exceeds `where` times the total."""
    total = 0.0
    for i in range(len(weights_V)):
        total += weights_V[i]
    target, reached, last = where * total, 0.0, -1
    for i in range(len(weights_V)):
        if weights_V[i] > 0:
            reached += weights_V[i]
            last = i
            if reached > target:
                break
    return last


KERNELS = (
    for_types(draw, "float32[::1], float32, int64, float64, float64, float64"),
    for_types(log_normalizer, "float32[::1]"),
    for_types(most_likely, "float32[::1], int64"),
    for_types(greatest, "float32[::1]"),
    for_types(is_finite, "float32[::1]"),
)
"""What reads logits without masks. The one that takes longest to compile is the first."""


_MASK = "Array(uint8, 1, 'C', readonly=True)"
OF_MASKS = (
    for_types(allowed_ids, f"{_MASK}, int64, int64"),
    for_types(forbid, f"float32[::1], {_MASK}, int64"),
    for_types(num_allowed, _MASK),
)
"""What masks need beyond that. A plan's masks are bytes, which nobody may write to."""
