"""Several threads for one kernel call: the calling thread takes the first part, a pool the rest.

Kernels run without the GIL. Nothing here decides what is added to what, so no bit depends on the number
of threads; with one thread there is no pool at all.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any


class Threads:
    """A stage's own threads. count: how many run at once, the caller included."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count - 1, "kernel") if count > 1 else None

    def run(self, kernel: Callable[..., None], arguments: tuple[Any, ...], bounds: list[int]) -> None:
        """kernel(*arguments, begin, end) for each pair of neighbouring bounds; returns when all are done."""
        if self._pool is None or len(bounds) == 2:
            kernel(*arguments, bounds[0], bounds[-1])
            return
        first, *others = pairwise(bounds)
        pending = [self._pool.submit(kernel, *arguments, *part) for part in others]
        kernel(*arguments, *first)
        for part in pending:
            part.result()

    def even_bounds(self, size: int, least: int) -> list[int]:
        """0 .. size in equal parts, one per thread, each of at least `least` (but for a single part)."""
        parts = max(1, min(self.count, size // least))
        return [size * part // parts for part in range(parts + 1)]
