"""Drawing where the logits are: every tensor rank has those of its own ids, and gives what a draw needs.

For a greedy draw that is the rank's best score and its id. With `top_k` it is the rank's k best: what survives
top_k is among them, and what survives is all that the rest of the draw sums over, in id order, so the sums are
those of a whole row. For all else, and where the k-th best score ties with one that is not among them, it is the
whole row: a draw without top_k sums the weights of all ids in their order, and so does a log-probability, in
pieces that do not end where a rank's ids end. To sum by ranks would change the order, and with it bits.

Bias, penalties and bans are applied to a rank's own scores before the best are chosen.

R rows, V vocabulary, v a rank's own ids, T tensor ranks, k candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.core.cut import Cut
from ppserve.core.plan import Draw, Drawn, Scored, StepPlan
from ppserve.model.backend import Results
from ppserve.model.gather import Gather
from ppserve.model.sampling import Floats, adjusted, draw_from, draw_token, read_logits, score
from ppserve.model.sampling_kernels import is_finite, most_likely

_MOST_CANDIDATES = 256
"""With a greater top_k the whole row is gathered."""
_FIELDS = 4
"""Before a rank's candidates: whether they suffice, its least score, that one's id, how many candidates follow."""
_NO, _YES, _NOT_FINITE = 0.0, 1.0, 2.0


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a row is read for. draw: None to be scored."""

    sequence_id: int
    draw: Draw | None
    position: int

    @property
    def num_candidates(self) -> int | None:
        """Of each rank; None: the whole row is needed."""
        if self.draw is None or self.draw.num_logprobs is not None:
            return None
        params = self.draw.params
        if params.temperature == 0:
            return 1
        return params.top_k if 0 < params.top_k <= _MOST_CANDIDATES else None


@dataclass(frozen=True, slots=True)
class _Row:
    """One row as the first rank has it. whole: its logits are of all ids; else `scores_V` are adjusted already,
    -inf but for the candidates; None where logits were not finite."""

    scores_V: Floats | None
    whole: bool


def read_slices(plan: StepPlan, pieces_Rv: Iterator[torch.Tensor], gather: Gather, vocabulary: Cut) -> Results:
    """`sampling.read_logits` of logits that are spread over tensor ranks; only the first gets results."""
    if len(vocabulary.widths) == 1:
        return read_logits(plan, pieces_Rv)
    drawn = [_Wanted(s.sequence_id, draw, position) for s in plan.slices for position, draw in s.draws]
    scored = [_Wanted(s.sequence_id, None, 0) for s in plan.slices for _ in s.targets]
    wanted = iter([*drawn, *scored])
    rows = [
        row
        for own_Rv in pieces_Rv
        for row in _gathered(own_Rv, list(islice(wanted, len(own_Rv))), gather, vocabulary)
    ]
    if vocabulary.rank:
        return (), ()
    left = iter(rows[len(drawn) :])
    return tuple(map(_draw, drawn, rows)), _scores(plan, left)


def _scores(plan: StepPlan, rows: Iterator[_Row]) -> tuple[Scored, ...]:
    logits = (row.scores_V for row in rows if row.scores_V is not None)
    return tuple(score(s, logits) for s in plan.slices if s.targets)


def _draw(wanted: _Wanted, row: _Row) -> Drawn:
    assert wanted.draw is not None
    if row.scores_V is None:
        return Drawn(wanted.sequence_id, None)
    if row.whole:
        return draw_token(wanted.sequence_id, wanted.draw, wanted.position, row.scores_V)
    token_id = draw_from(row.scores_V, wanted.draw, wanted.position)
    return Drawn(wanted.sequence_id, token_id if token_id >= 0 else None)


def _gathered(own_Rv: torch.Tensor, wanted: list[_Wanted], gather: Gather, vocabulary: Cut) -> Iterable[_Row]:
    """Rows of the first rank, in order."""
    few = [i for i, want in enumerate(wanted) if want.num_candidates is not None]
    rows: dict[int, _Row] = {}
    if few:
        slots = min(vocabulary.widths[0], max(wanted[i].num_candidates or 0 for i in few))
        logits_Rv = own_Rv.numpy()
        own = np.stack([_candidates(logits_Rv[i], wanted[i], slots, vocabulary.first) for i in few])
        same = Cut.of(own.shape[1] * len(vocabulary.widths), vocabulary.rank, len(vocabulary.widths))
        all_ranks = gather.all(torch.from_numpy(own), same).numpy()
        each = all_ranks.reshape(len(few), len(vocabulary.widths), -1)
        rows = {i: _merged(of_T, vocabulary.size) for i, of_T in zip(few, each, strict=True) if _suffice(of_T)}
    whole = [i for i in range(len(wanted)) if i not in rows]
    if whole:
        for i, logits_V in zip(whole, gather.all(own_Rv[whole], vocabulary).numpy(), strict=True):
            rows[i] = _Row(logits_V, whole=True)
    return [rows[i] for i in range(len(wanted))]


def _candidates(logits_v: Floats, wanted: _Wanted, slots: int, first: int) -> NDArray[np.float64]:
    """This rank's part of what the first rank needs of a row. Ids and scores are exact in float64."""
    assert wanted.draw is not None
    out = np.zeros(_FIELDS + 2 * slots)
    if not is_finite(logits_v):
        out[0] = _NOT_FINITE
        return out
    scores_v = adjusted(logits_v, wanted.draw, wanted.position, first)
    count = min(wanted.num_candidates or 0, len(scores_v))
    ids = most_likely(scores_v, min(count + 1, len(scores_v)))
    last = scores_v[ids[count - 1]]
    # A greedy draw takes the lowest of several best ids, which is there.
    is_tied = len(ids) > count and scores_v[ids[count]] == last > -np.inf and wanted.draw.params.temperature > 0
    least = int(np.where(scores_v > -np.inf, scores_v, np.inf).argmin())
    out[:_FIELDS] = _NO if is_tied else _YES, scores_v[least], first + least, count
    out[_FIELDS : _FIELDS + count] = first + ids[:count]
    out[_FIELDS + slots : _FIELDS + slots + count] = scores_v[ids[:count]]
    return out


def _suffice(of_T: NDArray[np.float64]) -> bool:
    return bool((of_T[:, 0] != _NO).all())


def _merged(of_T: NDArray[np.float64], vocab_size: int) -> _Row:
    """A row of the candidates' scores, and of each rank's least: the search for the k-th needs that. All other ids
    are banned."""
    if (of_T[:, 0] == _NOT_FINITE).any():
        return _Row(None, whole=False)
    scores_V = np.full(vocab_size, -np.inf, np.float32)
    slots = (of_T.shape[1] - _FIELDS) // 2
    for _, least, where, count, *numbers in of_T.tolist():
        scores_V[int(where)] = least
        ids, scores = numbers[: int(count)], numbers[slots : slots + int(count)]
        scores_V[[int(i) for i in ids]] = scores
    return _Row(scores_V, whole=False)
