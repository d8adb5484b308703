"""Memory for kernels: aligned to cache lines, and passed to them as addresses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

LINE_BYTES = 64


def aligned(shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Zeros that begin on a cache line; the system provides the memory as it is written."""
    size = math.prod(shape) if isinstance(shape, tuple) else shape
    num_bytes = size * np.dtype(dtype).itemsize
    memory = np.zeros(num_bytes + LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def address(array: NDArray[Any]) -> int:
    """Where an array begins; whoever keeps the address keeps the array."""
    assert array.flags.c_contiguous
    return int(array.ctypes.data)
