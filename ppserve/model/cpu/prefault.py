"""Memory that is taken from the system before it is needed.

A large zeroed array costs nothing until it is written; then the system clears page by page, 2 MB at a time where
pages are huge, and whoever writes first waits. Keys and values of all layers reach the end of their pages in the
same step, so a stage would stop for all of them at once: on a virtual machine whose memory its host hands out
lazily, 10 ms a page (docs/performance/pipeline.md).
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
# Lower than the stage's computing, but not so low that it could hold Python's lock for long while it does not run.
_NICENESS = 10


class Prefaulter:
    """Keeps the memory of blocks ready ahead of their use: as much again as was used, and a least amount.

    So it grows with what is used and no further. arrays: each (L, blocks, ...), on the CPU, contiguous.
    least_ahead: blocks.
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
        """Nothing more is wanted: the thread ends."""
        self.mark_used(self._num_blocks)

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
        # A thread of Linux has a priority of its own.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while self.num_ready < self._num_blocks:
            with self._changed:
                self._changed.wait_for(lambda: self.num_ready < self._wanted())
            # What was used meanwhile is there; what comes next is wanted first, in every layer.
            begin = max(self.num_ready, self._used)
            end = min(self._num_blocks, begin + -(-_AT_ONCE_BYTES // max(self._block_bytes)))
            for layer, block_bytes in zip(self._layers, self._block_bytes, strict=True):
                _populate(layer.data_ptr() + begin * block_bytes, (end - begin) * block_bytes)
            self.num_ready = end


def _can_populate() -> bool:
    """Whether the system knows how: tried on a page of its own."""
    if sys.platform != "linux":
        return False
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        place = ctypes.c_char.from_buffer(page)
        known = _populate(ctypes.addressof(place), mmap.PAGESIZE)
        del place
    return known


def _populate(address: int, num_bytes: int) -> bool:
    """Have the pages of this range, whatever they hold. ctypes lets other threads run meanwhile."""
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(address + num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    return bool(_madvise()(begin, end - begin, _MADV_POPULATE_WRITE) == 0)


@cache
def _madvise() -> Callable[[int, int, int], int]:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
