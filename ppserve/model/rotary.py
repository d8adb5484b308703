"""Rotary positions: the cosines and sines that rotate a position's queries and keys.

Angles are float32 products of position and frequency, as in the library transformers. Cosines and sines are
computed by float64 sums and products alone, which IEEE 754 defines exactly, so they have the same bits on every
CPU.

T rows, P positions, d features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ppserve.core.layers import Rotary
from ppserve.model.inputs import Ints

_QUARTER_HIGH = float.fromhex("0x1.921fb54p+0")
_QUARTER_LOW = float.fromhex("0x1.10b4611a62633p-30")
"""π / 2 in two parts. The first has so few bits that its products with small integers are exact."""


class RotaryTable:
    """The cosines and sines of one kind of rotary positions. It keeps those of all positions up to the greatest so
    far, and some more."""

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        self._rotations_Pd = np.empty((0, 2 * len(rotary.frequencies)), np.float32)

    def at(self, positions_T: Ints) -> NDArray[np.float32]:
        """Return each row's cosines, then its sines, (T, d)."""
        needed = int(positions_T.max(initial=-1)) + 1
        if needed > len(self._rotations_Pd):
            self._rotations_Pd = rotations(self._rotary, max(needed, 2 * len(self._rotations_Pd), 256))
        return self._rotations_Pd[positions_T]


def rotations_of(tables: Sequence[RotaryTable], positions_T: Ints) -> NDArray[np.float32] | None:
    """Return each row's cosines and sines by each of R tables, (R, T, d); None if there are no tables."""
    if not tables:
        return None
    return np.stack([table.at(positions_T) for table in tables])


def rotations(rotary: Rotary, num_positions: int) -> NDArray[np.float32]:
    """Return the cosines, then the sines, of the first P positions, times the magnitude, (P, d)."""
    frequencies = np.array(rotary.frequencies, np.float32)
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * frequencies
    cosines, sines = cosines_and_sines(angles)
    return np.concatenate([cosines, sines], axis=1) * np.float32(rotary.magnitude)


def cosines_and_sines(angles: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Compute the cosines and sines of angles from 0 to 2**22. Their error is below 1e-15 before they are rounded
    to float32."""
    x = angles.astype(np.float64)
    quarters = np.rint(x / (np.pi / 2))
    x = (x - quarters * _QUARTER_HIGH) - quarters * _QUARTER_LOW
    cosine, sine = _series(x, 0), x * _series(x, 1)
    turned = quarters.astype(np.int64) % 4
    swapped = turned % 2 == 1
    cosines = np.where(swapped, sine, cosine) * np.where((turned == 1) | (turned == 2), -1, 1)
    sines = np.where(swapped, cosine, sine) * np.where(turned >= 2, -1, 1)
    return cosines.astype(np.float32), sines.astype(np.float32)


def _series(x: NDArray[np.float64], first: int) -> NDArray[np.float64]:
    """Return 1 - x² / ((f + 1) (f + 2)) + ..., f = `first`: cos x for f = 0, and sin x / x for f = 1. |x| is at
    most π / 4."""
    square, total = x * x, np.ones_like(x)
    for n in range(first + 17, first, -2):
        total = 1 - total * square / (n * (n + 1))
    return total
