"""What is compiled in a process of its own while a first start still imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Starts the process, unless it has done its work before, and waits until it has ended. Prints whether it was
# started, and whether the kernels are kept on disk now.
CHILD = """
import os, threading
from ppserve.cli.serve import start_precompiling
from ppserve.config import ServeConfig
from ppserve.model.cache import precompiled_mark
start_precompiling(ServeConfig.from_flags({"force_cpu": True}))
started = [each for each in threading.enumerate() if each.name == "precompile"]
for each in started:
    each.join()
from ppserve.model import sampling_kernels
kept = [each.is_kept() for each in (*sampling_kernels.KERNELS, *sampling_kernels.OF_MASKS)]
print(len(started), all(kept), precompiled_mark(os.environ).exists())
"""


@pytest.mark.slow
@pytest.mark.timeout(600)  # the last kernels give way to other processes
def test_what_draws_and_masks_need_is_compiled_once(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)

    def run() -> str:
        command = [sys.executable, "-c", CHILD]
        return subprocess.check_output(command, cwd=ROOT, env=environment, text=True)

    assert run() == "1 True True\n"
    assert run() == "0 True True\n"
