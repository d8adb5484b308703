"""Batches of shapes, each in a child of a process that has compiled the kernels."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from tests.model.cpu.guarded.memory import NOTHING, Log, Withheld
from tests.model.cpu.guarded.shapes import Kept, shape_of, try_shape

_BATCH = 250
_BATCH_S = 600
_FAILED = 3
_WARM = 3
"""The seed of a shape with which each kernel is compiled or loaded, by one thread."""


class Batches:
    """Runs batches in one thread, the only one of its process."""

    def __init__(self, kept: tuple[Kept, ...]) -> None:
        torch.set_num_threads(1)
        self._kept, self._log = kept, Log()
        for way in kept:
            try_shape(replace(shape_of(_WARM), kept=way, threads=(1, 1)), Log())

    def problems(self, seeds: Sequence[int], withheld: Withheld = NOTHING) -> Iterator[str]:
        """What was wrong, for each shape with which something was."""
        left = list(seeds)
        while left:
            batch = left[:_BATCH]
            status = self._forked(lambda batch=batch: self._try(batch, withheld))
            if status == 0:
                left = left[len(batch) :]
                continue
            seed = self._log.seed
            left = left[left.index(seed) + 1 :]
            if os.WIFSIGNALED(status):
                name = signal.Signals(os.WTERMSIG(status)).name
                yield f"{name}: {self._log.fault() or f'seed {seed}, not in a guarded page'}"
            else:
                yield f"seed {seed}: failed, as stderr says"

    def buffers(self, seeds: Sequence[int]) -> dict[str, list[int]]:
        """The names of all buffers, and the shapes that have them."""
        found: dict[str, list[int]] = {}
        for seed in seeds:
            assert self._forked(lambda seed=seed: self._try([seed], NOTHING)) == 0, seed
            for name in sorted(set(self._log.names())):
                found.setdefault(name, []).append(seed)
        return found

    def fault_of(self, buffer: str, at_end: bool, seeds: Sequence[int]) -> str | None:
        """What shows if a buffer is too small: by a number or two, by a cache line, or by a row."""
        for num_bytes in (8, 64, 512):
            for problem in self.problems(seeds, Withheld(buffer, at_end, num_bytes)):
                if problem.endswith(buffer):
                    return f"{num_bytes} bytes withheld: {problem}"
        return None

    def _try(self, seeds: Sequence[int], withheld: Withheld) -> None:
        self._log.keep_faults()
        for seed in seeds:
            try_shape(shape_of(seed, self._kept), self._log, withheld)

    def _forked(self, function: Callable[[], None]) -> int:
        """The status of a child that calls this."""
        sys.stdout.flush()
        if child := os.fork():
            return os.waitpid(child, 0)[1]
        try:
            signal.alarm(_BATCH_S)
            function()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(_FAILED)
