"""Pages of memory that the system provides before they are written.

A large zeroed array costs nothing until it is written. Whoever first writes to a page (2 MB where pages are huge)
waits while the system clears it. Keys and values of all layers reach the ends of their pages in the same step, so
a stage would wait for all of these pages at once: 10 ms for each on a virtual machine whose host hands out memory
lazily (docs/performance.md).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Callable
from functools import cache

import torch

_MADV_POPULATE_WRITE = 23  # Linux 5.14: clears the pages now, changes nothing in those that are there
_AT_ONCE_BYTES = 2 << 20
# Below the threads that compute, but not so low that it could hold the GIL for long while it is not scheduled.
_NICENESS = 10


class Prefaulter:
    """Has pages ready for as many blocks again as are in use, and for `least_ahead` blocks at least.

    arrays: each (L, blocks, ...), on the CPU, contiguous.
    """

    def __init__(self, *arrays: torch.Tensor, least_ahead: int) -> None:
        self._layers = [layer for array in arrays for layer in array]
        self._num_blocks = len(self._layers[0])
        self._block_bytes: list[int] = [layer[0].nbytes for layer in self._layers]
        self._least_ahead = least_ahead
        self._used = 0
        self.num_ready = 0
        self._changed = threading.Condition()
        self.thread = threading.Thread(target=self._run, name="prefault", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Nothing more is wanted: ends the thread, after the pages that it is asking for."""
        self.mark_used(self._num_blocks)
        self.thread.join()

    def mark_used(self, num_blocks: int) -> None:
        """Blocks below `num_blocks` are in use. Once all are, the thread ends."""
        if num_blocks > self._used:
            with self._changed:
                self._used = num_blocks
                self._changed.notify()

    def _wanted(self) -> int:
        return min(self._num_blocks, max(2 * self._used, self._used + self._least_ahead))

    def _run(self) -> None:
        if not _can_populate():
            return
        # On Linux each thread has a priority of its own.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while self.num_ready < self._num_blocks:
            with self._changed:
                self._changed.wait_for(lambda: self.num_ready < self._wanted())
            # Blocks in use have their pages. The next blocks come first, in every layer.
            begin = max(self.num_ready, self._used)
            end = min(self._num_blocks, begin + -(-_AT_ONCE_BYTES // max(self._block_bytes)))
            for layer, block_bytes in zip(self._layers, self._block_bytes, strict=True):
                _populate(layer.data_ptr() + begin * block_bytes, (end - begin) * block_bytes)
            self.num_ready = end


def _can_populate() -> bool:
    """Whether the system supports it: tried on a page of its own."""
    if sys.platform != "linux":
        return False
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        place = ctypes.c_char.from_buffer(page)
        known = _populate(ctypes.addressof(place), mmap.PAGESIZE)
        del place
    return known


def _populate(address: int, num_bytes: int) -> bool:
    """Has the system provide the pages of this range; what they hold stays. ctypes releases the GIL meanwhile."""
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(address + num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    return bool(_madvise()(begin, end - begin, _MADV_POPULATE_WRITE) == 0)


@cache
def _madvise() -> Callable[[int, int, int], int]:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
