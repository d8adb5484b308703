"""Compiles at a first start what reads logits on CPUs: `python -m ppserve.stage.ahead PID`, a process of its own.

Numba is imported long before torch, so this goes on while the launcher and the stages still import. Those kernels
come first for which stages wait at their start. Those that only masks need come last and give way to other
processes, so no step in the middle of serving compiles them. PID: the process that started this one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path

from ppserve.model.cache import compiled_ahead
from ppserve.process.identity import name_process
from ppserve.process.lifetime import ENDING_SIGNALS, die_with_parent, ignore_signals

_NICENESS = 5
_GROUP = Path("/proc/self/autogroup")
"""Where Linux weighs sessions against each other, a process's own niceness counts only within its session."""


def main() -> None:
    """Compile the kernels, and note that they are kept."""
    die_with_parent(int(sys.argv[1]))
    ignore_signals(ENDING_SIGNALS)  # it ends with its parent
    name_process("ppserve.ahead")
    logging.disable()  # what goes wrong here goes wrong in each stage, which says so
    with contextlib.suppress(Exception):
        from ppserve.model import sampling_kernels
        from ppserve.model.compiled.together import compile_together

        compile_together(sampling_kernels.KERNELS, lambda which, count: None)
        _give_way()
        compile_together(sampling_kernels.OF_MASKS, lambda which, count: None)
        compiled_ahead(os.environ).touch()


def _give_way() -> None:
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        _GROUP.write_text(str(_NICENESS))


if __name__ == "__main__":
    main()
