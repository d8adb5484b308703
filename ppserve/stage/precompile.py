"""Compiles the kernels that read logits on CPUs, at the first start: `python -m ppserve.stage.precompile PID`.

This process imports numba, but not torch, so it compiles while the launcher and the stages still import. The
kernels for which stages wait at their start come first. Those that only masks need come last, and give way to
other processes. Without this, a step would compile them in the middle of serving.

PID: the process that started this one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path

from ppserve.model.cache import precompiled_mark
from ppserve.process.identity import name_process
from ppserve.process.lifetime import ENDING_SIGNALS, die_with_parent, ignore_signals

_NICENESS = 5
_GROUP = Path("/proc/self/autogroup")
"""Where Linux weighs sessions against each other, a process's own niceness counts only within its session."""


def main() -> None:
    """Compile the kernels, and make the file that says so (`precompiled_mark`)."""
    die_with_parent(int(sys.argv[1]))
    ignore_signals(ENDING_SIGNALS)  # it ends with its parent
    name_process("ppserve.compile")
    logging.disable()  # what goes wrong here goes wrong in each stage, which says so
    with contextlib.suppress(Exception):
        from ppserve.model import sampling_kernels
        from ppserve.model.compiled.together import compile_together

        compile_together(sampling_kernels.KERNELS, lambda which, count: None)
        _give_way()
        compile_together(sampling_kernels.OF_MASKS, lambda which, count: None)
        precompiled_mark(os.environ).touch()


def _give_way() -> None:
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        _GROUP.write_text(str(_NICENESS))


if __name__ == "__main__":
    main()
