"""Servers of tests that end with the process that tests, also when that is killed and no fixture cleans up."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

# A command of its own and not `preexec_fn`, whose fork may lock up in a process with threads of gRPC.
_DIE_WITH_PARENT = """
import os, sys
sys.path.insert(0, sys.argv[1])
from ppserve.process.lifetime import die_with_parent
die_with_parent(int(sys.argv[2]))
os.execvp(sys.argv[3], sys.argv[3:])
"""


def dying_with_us(command: Sequence[str]) -> list[str]:
    """The command, killed by the kernel when the thread that starts it ends. torchrun's ranks die with it."""
    root = str(Path(__file__).parents[1])
    return [sys.executable, "-c", _DIE_WITH_PARENT, root, str(os.getpid()), *command]
