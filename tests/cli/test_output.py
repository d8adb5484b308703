"""Where standard output cannot be written to: one line says so, or nothing where a pipe has no reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PLAN = [sys.executable, "-m", "ppserve", "plan"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="wants /dev/full, the disk that is always full")
def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(PLAN, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.stderr == "ppserve: error: standard output: No space left on device\n"
    assert done.returncode == 1


def test_a_pipe_without_a_reader_ends_the_command_in_silence() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "wb") as pipe:
        done = subprocess.run(PLAN, stdout=pipe, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (141, b"")


def test_without_standard_output_a_command_does_its_work() -> None:
    without = ["sh", "-c", 'exec "$@" >&-', "sh", *PLAN]
    done = subprocess.run(without, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
