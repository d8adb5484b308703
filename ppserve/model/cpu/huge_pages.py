"""Memory for weights, in huge pages where the system has them.

Each step of a decode reads all weights. In pages of 4 KiB a processor looks up a page's place for every 64 cache
lines, on a virtual machine twice, and fetches nothing ahead beyond the page's end (docs/performance.md).
Where huge pages must be asked for, as on most systems, the C library's heap, where a layer's matrices would lie,
has none.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ppserve.model.cpu.kernels.memory import LINE_BYTES

PAGE_BYTES = 2 << 20
# Taken from the system at once. What is never written costs nothing.
_REGION_BYTES = 64 << 20
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)


class HugePages:
    """Arrays one behind the other, which all live as long as any of them. For one thread."""

    def __init__(self) -> None:
        self._region = np.zeros(0, np.uint8)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[np.generic]:
        """Begins on a cache line."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if num_bytes > len(self._region):
            self._region = _region(max(_REGION_BYTES, num_bytes))
        array = self._region[:num_bytes].view(dtype).reshape(shape)
        self._region = self._region[-(-num_bytes // LINE_BYTES) * LINE_BYTES :]
        return array


def _region(num_bytes: int) -> NDArray[np.uint8]:
    """At least so many zeros, from the beginning of a page. The array keeps the memory. Raises MemoryError."""
    size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    try:
        memory = mmap.mmap(-1, size + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system has no {size >> 20} MB for weights: {error}") from None
    if _ADVICE is not None:
        with contextlib.suppress(OSError):  # a system without them has other pages
            memory.madvise(_ADVICE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % PAGE_BYTES
    return whole[start : start + size]
