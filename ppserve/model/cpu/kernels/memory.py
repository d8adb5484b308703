"""Memory for kernels: aligned to cache lines, in huge pages where it is large, and passed as addresses.

Each step of a decode reads all weights. In pages of 4 KiB a processor looks up a page's place for every 64 cache
lines, and fetches nothing ahead beyond the page's end. Most systems give huge pages only where they are asked for,
and so the C library's heap has none.
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
    """Where the memory of kernels comes from: the system. Tests provide some whose ends must not be touched."""

    region_bytes = 64 << 20
    """What an arena takes at once. Memory that is never written costs nothing."""

    def lines(self, num_bytes: int) -> NDArray[np.uint8]:
        """Zeros from a cache line on."""
        memory = np.zeros(num_bytes + LINE_BYTES, np.uint8)
        start = -memory.ctypes.data % LINE_BYTES
        return memory[start : start + num_bytes]

    def pages(self, num_bytes: int) -> NDArray[np.uint8]:
        """Zeros from the beginning of a huge page. Raises MemoryError."""
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
    """Have the kernels of this process get their memory from there, from now on."""
    global _memory
    _memory = memory


def aligned(size: int, dtype: DTypeLike) -> NDArray[Any]:
    """Zeros from a cache line on; the system provides memory as it is written."""
    return _memory.lines(size * np.dtype(dtype).itemsize).view(dtype)


def address(array: NDArray[Any]) -> int:
    """Where an array begins; the caller keeps the array as long as the address."""
    assert array.flags.c_contiguous
    return int(array.ctypes.data)


def huge_pages(num_bytes: int) -> NDArray[np.uint8]:
    """Zeros from the beginning of a huge page. The array keeps the memory. Raises MemoryError."""
    return _memory.pages(num_bytes)


def start_populating(array: NDArray[np.uint8]) -> threading.Thread:
    """Has the system provide this memory, in a thread that this returns, so that most writes need not wait while a
    page is cleared. What is written meanwhile stays."""
    # Compiled or loaded here: the thread would do so at its low priority, with locks that others need.
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
    """Adds zero in each page. If it were a constant, the compiler would leave the addition out."""
    for offset in range(0, len(array), mmap.PAGESIZE):
        add_shared(array.ctypes.data + offset, zero)  # type: ignore[call-arg]


class Arena:
    """Arrays one behind the other in huge pages, which live as long as any of them. For one thread."""

    def __init__(self) -> None:
        self._region = np.zeros(0, np.uint8)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Begins on a cache line. Raises MemoryError."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if num_bytes > len(self._region):
            self._region = huge_pages(max(_memory.region_bytes, num_bytes))
        array = self._region[:num_bytes].view(dtype).reshape(shape)
        self._region = self._region[-(-num_bytes // LINE_BYTES) * LINE_BYTES :]
        return array
