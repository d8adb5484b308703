"""What a step draws and scores, as arrays for the device.

Every row that is read out has a number to draw with and a target, whether they are used or not. R rows read out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppserve.core.request import SamplingParams
from ppserve.model.sampling import ReadRow, unpacked_biases, unpacked_ids

PER_ROW = ("points", "top_p", "min_p", "temperature", "top_k", "targets")
"""The arrays with one number for every row. `targets` has -1 where a row has none."""

ADJUSTMENTS = ("adjusted_rows", "adjusted_ids", "bias", "repetition", "frequency", "presence")
"""The arrays with one number for every pair of a row and an id whose score is changed before the draw. They are
applied in this order: the bias is added; repetition multiplies a negative score and divides any other; frequency
(already times the occurrences) and presence are subtracted. The presence of a banned id is infinite."""


@dataclass(frozen=True, slots=True)
class Draws:
    """What the rows of a step ask for."""

    rows: Sequence[ReadRow]
    filters: bool
    """Whether any draw leaves ids out by top_k, top_p or min_p."""
    adjustments: dict[str, NDArray[Any]]
    """The arrays of `ADJUSTMENTS` by name, with rows ascending; empty if no score is changed."""
    masks: dict[str, NDArray[Any]]
    """`masked_rows`, ascending, and `masks`, which has each one's `Draw.mask`; empty if no row has a mask."""
    num_top: int | None
    """The most log-probabilities that any row asks for; None: no row asks for any."""

    @classmethod
    def from_rows(cls, rows: Sequence[ReadRow], vocab_size: int) -> Draws:
        asked = [row.num_top for row in rows if row.num_top is not None]
        return cls(
            rows=rows,
            filters=any(row.draw is not None and _filters(row.draw.params) for row in rows),
            adjustments=_adjustments(rows, vocab_size),
            masks=_masks(rows, vocab_size),
            num_top=max(asked, default=None),
        )

    @property
    def is_plain(self) -> bool:
        """Whether each row asks only for a draw from all ids."""
        return not self.filters and not self.changes and self.num_top is None

    @property
    def changes(self) -> dict[str, NDArray[Any]]:
        """All arrays that change scores before the draw; empty if there are none."""
        return {**self.adjustments, **self.masks}

    def masks_of(self, rows: slice) -> slice:
        """Return where the masks of these rows are in `masks`."""
        return slice(*np.searchsorted(self.masks["masked_rows"], (rows.start, rows.stop)).tolist())

    def adjustments_of(self, rows: slice) -> slice:
        """Return where the adjustments of these rows are in `adjustments`."""
        return slice(*np.searchsorted(self.adjustments["adjusted_rows"], (rows.start, rows.stop)).tolist())

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays of `PER_ROW`. A greedy draw has temperature 0."""
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
            "targets": np.array([-1 if row.target is None else row.target for row in self.rows], np.int32),
        }


_ANY = SamplingParams(temperature=0.0)
_MASK = (1 << 64) - 1
_NO_LIMIT = (1 << 31) - 1


def uniforms(seed: NDArray[np.uint64], index: NDArray[np.uint64], position: NDArray[np.uint64]) -> NDArray[Any]:
    """Return `sampling.uniform` for many keys at once."""
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
    """See `ADJUSTMENTS`."""
    drawn = [(number, row.draw, row.draw.params) for number, row in enumerate(rows) if row.draw is not None]
    past = [(n, draw, of) for n, draw, of in drawn if of.needs_history]
    biases = [(n, *unpacked_biases(draw.biases)) for n, draw, _ in drawn if draw.biases]
    banning = [(n, draw) for n, draw, _ in drawn if draw.banned and rows[n].position < draw.banned_before]
    lists = (
        [(n, np.asarray(draw.banned, np.int64)) for n, draw in banning],
        [(n, ids) for n, ids, _ in biases],
        [(n, unpacked_ids(draw.prompt_ids)) for n, draw, _ in past],
        [(n, unpacked_ids(draw.output_ids)) for n, draw, _ in past],
    )
    if not any(lists):
        return {}
    keys = [_keys(each) for each in lists]
    keys_n, entry = np.unique(np.concatenate(keys), return_inverse=True)
    banned, biased, prompt, output = np.split(entry, np.cumsum([len(each) for each in keys])[:-1])
    rows_n, ids_n = keys_n >> 32, keys_n & 0xFFFFFFFF
    bias_n = np.zeros(len(keys_n))
    presence_n = np.zeros(len(keys_n))
    repetition_n = np.ones(len(keys_n))
    frequency_R, presence_R, repetition_R = np.zeros((3, len(rows)), np.float32)
    for n, _, of in past:
        frequency_R[n], presence_R[n], repetition_R[n] = (
            of.frequency_penalty, of.presence_penalty, of.repetition_penalty
        )  # fmt: skip
    bias_n[biased] = np.concatenate([np.empty(0, np.float32), *[values for _, _, values in biases]])
    for seen in (prompt, output):
        repetition_n[seen] = repetition_R[rows_n[seen]]
    times_n = np.bincount(output, minlength=len(keys_n)).astype(np.float32)
    presence_n[output] = presence_R[rows_n[output]]
    presence_n[banned] = np.inf
    columns_n = (rows_n, ids_n, bias_n, repetition_n, frequency_R[rows_n] * times_n, presence_n)
    known_n = ids_n < vocab_size
    if not known_n.any():
        return {}
    types = (np.int32, np.int32, *[np.float32] * 4)
    columns = (of_n[known_n].astype(of_type) for of_n, of_type in zip(columns_n, types, strict=True))
    return dict(zip(ADJUSTMENTS, columns, strict=True))


def _masks(rows: Sequence[ReadRow], vocab_size: int) -> dict[str, NDArray[Any]]:
    """See `Draws.masks`."""
    masked = [
        (n, row.draw.mask) for n, row in enumerate(rows) if row.draw is not None and row.draw.mask is not None
    ]
    if not masked:
        return {}
    num_bytes = -(-vocab_size // 8)
    whole = b"".join(mask[:num_bytes].ljust(num_bytes, b"\0") for _, mask in masked)
    return {"masked_rows": np.array([n for n, _ in masked], np.int32), "masks": np.frombuffer(whole, np.uint8)}


def _keys(lists: Sequence[tuple[int, NDArray[np.int64]]]) -> NDArray[np.int64]:
    """Return row << 32 | id for all pairs of a row and one of its ids, one after the other."""
    return np.concatenate([np.empty(0, np.int64), *[(row << 32) + ids for row, ids in lists]])
