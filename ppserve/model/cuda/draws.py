"""What a step draws and scores, as arrays for the device.

Every row that is read out gets the same numbers: one to draw with, one target, or both unused. R rows read out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppserve.core.plan import Draw, StepPlan
from ppserve.core.request import SamplingParams

NO_TARGET = -1

PER_ROW = ("points", "top_p", "min_p", "temperature", "top_k", "targets")
"""The arrays with one number for every row."""

ADJUSTMENTS = ("bias", "repeat", "count", "ban")
"""Of scores before drawing, in this order: added biases, the repetition penalty, the penalties that count a
token's occurrences, banned ids."""


@dataclass(frozen=True, slots=True)
class ReadRow:
    """One row that is read out: drawn from, scored, or neither."""

    draw: Draw | None = None
    position: int = 0
    """Of the token that is drawn."""
    target: int = NO_TARGET
    """The token whose log-probability is asked for."""
    num_top: int | None = None
    """How many of the most likely tokens are asked for; None without log-probabilities."""


def rows_read(plan: StepPlan) -> list[ReadRow]:
    """In the order of `StepRows.read_rows`."""
    drawn = [ReadRow(draw, at, num_top=draw.num_logprobs) for s in plan.slices for at, draw in s.draws]
    scored = [ReadRow(target=t, num_top=s.num_prompt_logprobs) for s in plan.slices for t in s.targets]
    return drawn + scored


def rows_of_slices(plan: StepPlan, count: int) -> list[ReadRow]:
    """The rows of a recorded step: one per slice, in order, and padding up to `count`."""
    of_slices = [
        next((ReadRow(draw, at, num_top=draw.num_logprobs) for at, draw in s.draws), ReadRow())
        for s in plan.slices
    ]
    return of_slices + [ReadRow()] * (count - len(of_slices))


@dataclass(frozen=True, slots=True)
class Draws:
    """What the rows of a step ask for."""

    rows: Sequence[ReadRow]
    filters: bool
    """Whether any draw leaves ids out by top_k, top_p or min_p."""
    adjustments: dict[str, NDArray[Any]]
    """Changes of scores before drawing, as `_adjustments` lists them."""
    num_top: int | None
    """The most that any row asks for; None without log-probabilities."""

    @classmethod
    def of_rows(cls, rows: Sequence[ReadRow], vocab_size: int) -> Draws:
        asked = [row.num_top for row in rows if row.num_top is not None]
        return cls(
            rows=rows,
            filters=any(row.draw is not None and _filters(row.draw.params) for row in rows),
            adjustments=_adjustments(rows, vocab_size),
            num_top=max(asked, default=None),
        )

    @property
    def is_plain(self) -> bool:
        """Whether nothing is asked for but a draw from all ids."""
        return not self.filters and not self.adjustments and self.num_top is None

    def entries(self, kind: str, rows: slice) -> slice:
        """The adjustments of a kind that belong to these rows."""
        return slice(*np.searchsorted(self.adjustments[f"{kind}.rows"], (rows.start, rows.stop)).tolist())

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The point and the limits of every row's draw. A greedy draw has temperature 0."""
        params = [_ANY if row.draw is None else row.draw.params for row in self.rows]
        seeds = np.array([of.seed & _MASK for of in params], np.uint64)
        index = np.array([0 if row.draw is None else row.draw.index for row in self.rows], np.uint64)
        position = np.array([row.position for row in self.rows], np.uint64)
        return {
            "points": uniforms(seeds, index, position),
            "top_p": np.array([of.top_p for of in params], np.float64),
            "min_p": np.array([of.min_p for of in params], np.float64),
            "temperature": np.array([of.temperature for of in params], np.float32),
            "top_k": np.array([min(of.top_k, _NO_LIMIT) or _NO_LIMIT for of in params], np.int32),
            "targets": np.array([row.target for row in self.rows], np.int32),
        }


_ANY = SamplingParams(temperature=0.0)
_MASK = (1 << 64) - 1
_NO_LIMIT = (1 << 31) - 1


def uniforms(seed: NDArray[np.uint64], index: NDArray[np.uint64], position: NDArray[np.uint64]) -> NDArray[Any]:
    """`sampling.uniform` of many keys."""
    state = np.zeros(len(seed), np.uint64)
    for part in (seed, index, position):
        z = state + part + np.uint64(0x9E3779B97F4A7C15)  # modulo 2**64, as unsigned numbers are
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = z ^ (z >> np.uint64(31))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _filters(params: SamplingParams) -> bool:
    return params.temperature != 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def _adjustments(rows: Sequence[ReadRow], vocab_size: int) -> dict[str, NDArray[Any]]:
    """Entries (row, id, numbers) of each kind, rows ascending. Arrays are called `bias.rows`, `bias.ids`, `bias.0`
    and so on; a kind without entries has none."""
    drawn = [(number, row.draw, row.draw.params) for number, row in enumerate(rows) if row.draw is not None]
    banned = [(n, draw.banned) for n, draw, _ in drawn if draw.banned and rows[n].position < draw.banned_before]
    biased = [(n, tuple(zip(*of.logit_bias, strict=True))) for n, _, of in drawn if of.logit_bias]
    past = [(n, draw, of) for n, draw, of in drawn if of.needs_history]
    repeated = [(n, draw.prompt_ids + draw.output_ids) for n, draw, of in past if of.repetition_penalty != 1.0]
    entries: dict[str, tuple[NDArray[Any], ...]] = {}
    if banned:
        entries["ban"] = _listed(banned)
    if biased:
        ids, biases = ([(n, both[i]) for n, both in biased] for i in range(2))
        entries["bias"] = *_listed(ids), _listed(biases)[1]
    if past:
        frequency_R, presence_R, repetition_R = np.zeros((3, len(rows)))
        for n, _, of in past:
            frequency_R[n], presence_R[n] = of.frequency_penalty, of.presence_penalty
            repetition_R[n] = of.repetition_penalty
        rows_n, ids_n, times_n = _counted([(n, draw.output_ids) for n, draw, _ in past])
        entries["count"] = rows_n, ids_n, frequency_R[rows_n], times_n, presence_R[rows_n]
        rows_n, ids_n, _ = _counted(repeated)
        entries["repeat"] = rows_n, ids_n, repetition_R[rows_n]
    arrays: dict[str, NDArray[Any]] = {}
    for kind, (rows_n, ids_n, *numbers) in entries.items():
        known_n = ids_n < vocab_size
        if known_n.any():
            whole = {"rows": rows_n, "ids": ids_n}
            arrays |= {f"{kind}.{name}": of_n[known_n].astype(np.int32) for name, of_n in whole.items()}
            arrays |= {f"{kind}.{i}": of_n[known_n].astype(np.float32) for i, of_n in enumerate(numbers)}
    return arrays


_Lists = Sequence[tuple[int, Sequence[float]]]
"""Rows, each with numbers."""


def _listed(lists: _Lists) -> tuple[NDArray[Any], NDArray[Any]]:
    """All numbers one after the other: (n,) their rows, (n,) the numbers."""
    rows_n = np.repeat(np.array([row for row, _ in lists], np.int64), [len(numbers) for _, numbers in lists])
    return rows_n, np.fromiter(chain.from_iterable(numbers for _, numbers in lists), np.float64, len(rows_n))


def _counted(lists: _Lists) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Each row's ids without repetitions: (n,) rows, (n,) ids, (n,) counts."""
    rows_n, ids_n = _listed(lists)
    keys_n, times_n = np.unique((rows_n << 32) + ids_n.astype(np.int64), return_counts=True)
    return keys_n >> 32, keys_n & 0xFFFFFFFF, times_n
