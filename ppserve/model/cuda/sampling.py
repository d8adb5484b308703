"""Drawing and scoring on the device by the rules of `model.sampling`, without a loop over rows.

From the same logits, a GPU draws the same tokens as a CPU: the uniform numbers and the weights have the same bits.
Only float64 sums over the vocabulary are made in another order, which does not depend on other rows. So a draw
within 1e-15 of the border between two ids may differ, and log-probabilities differ by as little.

R rows, V vocabulary, n adjustments.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.core.plan import Draw, Drawn, Scored, StepPlan, TokenLogprobs
from ppserve.model.backend import Results
from ppserve.model.cuda.draws import ADJUSTMENTS, PER_ROW, Draws
from ppserve.model.cuda.operators import Operators
from ppserve.model.sampling import GREATEST

DeviceArrays = Mapping[str, torch.Tensor]

_NOTHING = -1
"""Stands for a token that could not be drawn."""


def draw_plain(operators: Operators, logits_RV: torch.Tensor, arrays: DeviceArrays) -> torch.Tensor:
    """Draw a token per row from all ids. Return them as float64, (R, 1)."""
    return _draw(operators, logits_RV, logits_RV, arrays, filters=False)[:, None].double()


def read_rows(
    operators: Operators, logits_RV: torch.Tensor, draws: Draws, arrays: DeviceArrays, first: int
) -> torch.Tensor:
    """Return float64 (R, columns) for the rows from `first` on: the token and, if log-probabilities are asked for,
    the log of the sum of exponentials, the token's logit, the greatest logits, and the ids of these."""
    rows = slice(first, first + len(logits_RV))
    own = {name: array[rows] for name, array in arrays.items() if name in PER_ROW}
    tokens_R = targets_R = own["targets"].long()
    if any(row.draw is not None for row in draws.rows[rows]):
        scores_RV = _adjusted(logits_RV, arrays, draws, rows)
        drawn_R = _draw(operators, logits_RV, scores_RV, own, draws.filters)
        tokens_R = torch.where(targets_R < 0, drawn_R, targets_R)
    columns = [tokens_R[:, None].double()]
    if draws.num_top is not None:
        columns += _logprobs(operators, logits_RV, tokens_R, draws.num_top)
    return torch.cat(columns, 1)


def results_of(plan: StepPlan, columns_RC: NDArray[np.float64]) -> Results:
    """Return what a plan draws and scores, from the columns of `read_rows` or `draw_plain`."""
    lines = iter(columns_RC.tolist())
    drawn = tuple(_drawn(s.sequence_id, draw, next(lines)) for s in plan.slices for _, draw in s.draws)
    scored = tuple(
        Scored(s.sequence_id, tuple(_token_logprobs(next(lines), s.num_prompt_logprobs) for _ in s.targets))
        for s in plan.slices
        if s.targets
    )
    return drawn, scored


def _drawn(sequence_id: int | None, wanted: Draw, line: list[float]) -> Drawn:
    token_id = int(line[0])
    if token_id == _NOTHING:
        return Drawn(sequence_id, None)
    num_top = wanted.num_logprobs
    return Drawn(sequence_id, token_id, None if num_top is None else _token_logprobs(line, num_top))


def _token_logprobs(line: list[float], num_top: int) -> TokenLogprobs:
    _, normalizer, logit, *top = line
    most = len(top) // 2
    logits, ids = top[: min(num_top, most)], top[most:]
    alternatives = tuple((int(i), of - normalizer) for i, of in zip(ids, logits, strict=False))
    return TokenLogprobs(logit - normalizer, alternatives)


def _draw(
    operators: Operators, logits_RV: torch.Tensor, scores_RV: torch.Tensor, arrays: DeviceArrays, filters: bool
) -> torch.Tensor:
    """Return ids (R,). It is _NOTHING where logits are not finite, or no id is left."""
    most_R, best_R = scores_RV.max(1)
    is_greedy_R = arrays["temperature"] == 0
    weights_RV = operators.weights(scores_RV, most_R, torch.where(is_greedy_R, 1.0, arrays["temperature"]))
    if filters:
        weights_RV = torch.where(_survivors(operators, scores_RV, weights_RV, arrays), weights_RV, 0.0)
    reached_RV = operators.running_sums(weights_RV)
    total_R1 = reached_RV[:, -1:].contiguous()
    drawn_R1 = torch.searchsorted(reached_RV, arrays["points"][:, None] * total_R1, right=True)
    # Rounding may put the point at the very end. Then it is the last id that has any weight.
    drawn_R = torch.minimum(drawn_R1, torch.searchsorted(reached_RV, total_R1))[:, 0]
    is_drawn_R = torch.isfinite(logits_RV).all(1) & (most_R > -torch.inf)
    return torch.where(is_drawn_R, torch.where(is_greedy_R, best_R, drawn_R), _NOTHING)


def _survivors(
    operators: Operators, scores_RV: torch.Tensor, weights_RV: torch.Tensor, arrays: DeviceArrays
) -> torch.Tensor:
    """Return which ids top_k, top_p and min_p leave, bool (R, V). Equal scores are ranked by their ids."""
    vocabulary = scores_RV.shape[1]
    ranked_RV, ids_RV = scores_RV.sort(dim=1, descending=True, stable=True)
    least_R1 = ranked_RV.gather(1, arrays["top_k"].long().clamp(max=vocabulary)[:, None] - 1)
    allowed_RV = (ranked_RV >= least_R1) & (ranked_RV > -torch.inf)
    ranked_weights_RV = torch.where(allowed_RV, weights_RV.gather(1, ids_RV), 0.0)
    reached_RV = operators.running_sums(ranked_weights_RV)
    top_p_R1 = arrays["top_p"][:, None]
    before_RV = reached_RV - ranked_weights_RV
    in_nucleus_RV = allowed_RV & (before_RV < top_p_R1 * reached_RV[:, -1:])
    last_R1 = in_nucleus_RV.sum(1, keepdim=True).clamp(min=1) - 1  # the first stays, whatever the limit
    least_R1 = torch.where(top_p_R1 < 1, ranked_RV.gather(1, last_R1), least_R1)
    last_id_R1 = torch.where(top_p_R1 < 1, ids_RV.gather(1, last_R1), vocabulary)
    ids_V = torch.arange(vocabulary, device=scores_RV.device)
    is_left_RV = (scores_RV > least_R1) | ((scores_RV == least_R1) & (ids_V <= last_id_R1))
    return is_left_RV & (weights_RV.double() >= arrays["min_p"][:, None])


def _adjusted(logits_RV: torch.Tensor, arrays: DeviceArrays, draws: Draws, rows: slice) -> torch.Tensor:
    """Return the scores after biases, penalties, bans and masks. If there are none, these are the logits."""
    scores_RV = logits_RV.clone() if draws.changes else logits_RV
    if draws.adjustments:
        _adjust(scores_RV, arrays, draws, rows)
    if draws.masks:
        _mask(scores_RV, arrays, draws, rows)
    return scores_RV


def _adjust(scores_RV: torch.Tensor, arrays: DeviceArrays, draws: Draws, rows: slice) -> None:
    own = draws.adjustments_of(rows)
    row_n, id_n, bias_n, repetition_n, frequency_n, presence_n = (arrays[name][own] for name in ADJUSTMENTS)
    at = row_n.long() - rows.start, id_n.long()
    scores_n = scores_RV[at] + bias_n
    repeated_n = torch.where(scores_n < 0, scores_n * repetition_n, scores_n / repetition_n)
    scores_RV[at] = repeated_n.clamp(-GREATEST, GREATEST) - frequency_n - presence_n


def _mask(scores_RV: torch.Tensor, arrays: DeviceArrays, draws: Draws, rows: slice) -> None:
    """Set the scores that a row's mask forbids to -inf, in place."""
    own, vocabulary = draws.masks_of(rows), scores_RV.shape[1]
    masks_MB = arrays["masks"].view(len(arrays["masked_rows"]), -1)[own]
    bits_MB8 = (masks_MB[:, :, None] >> torch.arange(8, device=masks_MB.device, dtype=torch.uint8)) & 1
    at_M = arrays["masked_rows"][own].long() - rows.start
    scores_RV[at_M] = scores_RV[at_M].masked_fill(bits_MB8.flatten(1)[:, :vocabulary] == 0, -torch.inf)


def _logprobs(
    operators: Operators, logits_RV: torch.Tensor, tokens_R: torch.Tensor, num_top: int
) -> list[torch.Tensor]:
    """Return the columns from which log-probabilities are computed (see `read_rows`)."""
    most_R = logits_RV.amax(1)
    weights_RV = operators.weights(logits_RV, most_R, torch.ones_like(most_R))
    normalizer_R = most_R.double() + operators.running_sums(weights_RV)[:, -1].log()
    own_R1 = logits_RV.gather(1, tokens_R.clamp(min=0)[:, None])
    columns = [normalizer_R[:, None], own_R1.double()]
    if num_top:
        # A stable sort ranks equal logits by their ids; `topk` does not.
        ranked_RV, ids_RV = logits_RV.sort(dim=1, descending=True, stable=True)
        columns += [ranked_RV[:, :num_top].double(), ids_RV[:, :num_top].double()]
    return columns
