"""Memory for kernels: aligned to cache lines, in huge pages where it is large, and passed as addresses.

Each step of a decode reads all weights. With pages of 4 KiB, a processor translates an address for every 64 cache
lines, and fetches nothing ahead beyond the end of a page. Most systems give huge pages only where they are asked
for, so the C library's heap has none.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import sys
import threading
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ppserve.model.compiled.jit import kernel
from ppserve.model.cpu.kernels.atomics import add_shared

LINE_BYTES = 64
PAGE_BYTES = 2 << 20
_LOWEST_PRIORITY = 19


class Memory:
    """Takes the memory of kernels from the system. Tests provide another kind, whose ends must not be touched."""

    region_bytes = 64 << 20
    """How many bytes an arena takes at once. Memory that is never written costs nothing."""

    def lines(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return zeros that begin on a cache line."""
        memory = np.zeros(num_bytes + LINE_BYTES, np.uint8)
        start = -memory.ctypes.data % LINE_BYTES
        return memory[start : start + num_bytes]

    def pages(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return zeros that begin on a huge page. Raises MemoryError."""
        size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        try:
            memory = mmap.mmap(-1, size + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"the system has no {size >> 20} MB: {error}") from None
        with contextlib.suppress(OSError, AttributeError):  # there are none, or the system is not Linux
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(memory, np.uint8)
        start = -whole.ctypes.data % PAGE_BYTES
        return whole[start : start + num_bytes]


_memory = Memory()


def provide(memory: Memory) -> None:
    """Let the kernels of this process get their memory from `memory` from now on."""
    global _memory
    _memory = memory


def aligned(size: int, dtype: DTypeLike) -> NDArray[Any]:
    """Return zeros that begin on a cache line. The system provides the memory as it is written."""
    return _memory.lines(size * np.dtype(dtype).itemsize).view(dtype)


def address(array: NDArray[Any]) -> int:
    """Return where an array begins. The caller must keep the array as long as the address."""
    assert array.flags.c_contiguous
    return int(array.ctypes.data)


def huge_pages(num_bytes: int) -> NDArray[np.uint8]:
    """Return zeros that begin on a huge page. The memory lives as long as the array. Raises MemoryError."""
    return _memory.pages(num_bytes)


def start_populating(array: NDArray[np.uint8]) -> threading.Thread:
    """Let the system provide this memory now, so that few writes have to wait while a page is cleared. A thread
    does it, which is returned. What others write meanwhile stays."""
    # The kernel is compiled or loaded here. The thread would do so at its low priority, with locks that others
    # need.
    _touch(array[:0], 0)

    def touch() -> None:
        if sys.platform == "linux":  # where each thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        _touch(array, 0)

    thread = threading.Thread(target=touch, name="populate", daemon=True)
    thread.start()
    return thread


@kernel
def _touch(array: NDArray[np.uint8], zero: int) -> None:
    """Add zero to a number in each page. If zero were a constant, the compiler would leave the addition out."""
    for offset in range(0, len(array), mmap.PAGESIZE):
        add_shared(array.ctypes.data + offset, zero)  # type: ignore[call-arg]


class Arena:
    """Arrays one behind the other in huge pages. The memory lives as long as any of the arrays. For one thread."""

    def __init__(self) -> None:
        self._region = np.zeros(0, np.uint8)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an array of zeros that begins on a cache line. Raises MemoryError."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if num_bytes > len(self._region):
            self._region = huge_pages(max(_memory.region_bytes, num_bytes))
        array = self._region[:num_bytes].view(dtype).reshape(shape)
        self._region = self._region[-(-num_bytes // LINE_BYTES) * LINE_BYTES :]
        return array
