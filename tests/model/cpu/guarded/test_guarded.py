"""Kernels stay within their memory in 250 shapes (`make guarded`: 100,000); a buffer that is too small shows."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ppserve.model.compiled.jit import KERNELS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="who touched which page is asked of Linux"),
]


def guarded(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own, with threads of our kernels only."""
    return subprocess.run(
        [sys.executable, "-m", "tests.model.cpu.guarded", *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.mark.timeout(420)
def test_kernels_stay_within_their_memory() -> None:
    done = guarded(250, "--usual")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "250 shapes, 0 wrong" in done.stdout


@pytest.mark.timeout(420)
def test_each_buffer_that_is_too_small_shows() -> None:
    done = guarded(24, "--usual", "--withheld")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SIGSEGV") >= 70


@pytest.mark.timeout(420)
def test_loops_over_a_vocabulary_stay_within_the_arrays_that_they_make() -> None:
    """numba takes the memory of these arrays, and checks every index if it is asked to."""
    checked = {"NUMBA_BOUNDSCHECK": "1", KERNELS: f"{os.environ[KERNELS]}/checked"}
    done = guarded(300, "--sampling", **checked)
    assert done.returncode == 0, done.stderr
