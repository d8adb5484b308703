"""A run of tests ends, and as failed, where a worker dies or hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests import workers
workers.GRACE_S = 1
pytest_plugins = ["tests.workers"]
"""
ENDS = {
    "aborts": "os.abort()",
    "fails and hangs": "request.addfinalizer(threading.Event().wait); raise ValueError",
    # The second time it waits for itself, with Python's lock in hand: no signal is handled any more.
    "hangs in native code": "[ctypes.PyDLL(None).pthread_mutex_lock(mutex) for _ in range(2)]",
}
DYING = """
import ctypes, os, threading, pytest

mutex = ctypes.create_string_buffer(64)

def test_before():
    pass

@pytest.mark.timeout(2)
def test_that_ends_its_worker(request):
    with open("times", "a") as file:
        file.write("once")
    {end}
"""
WAITING = """
import threading

def test_that_waits():
    threading.Event().wait()

def test_after():
    pass
"""


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_worker_that_dies_ends_the_run_with_the_name_of_its_test(end: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_dying.py").write_text(DYING.format(end=end))
    (tmp_path / "test_waiting.py").write_text(WAITING)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\ntimeout = 600\n")
    without = "-p", "no:anyio", "-p", "no:hypothesispytest"  # whose imports take longer than these tests
    command = "-m", "pytest", *without, "-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder"
    ran = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ran.returncode == pytest.ExitCode.INTERRUPTED, ran.stdout
    assert "FAILED test_dying.py::test_that_ends_its_worker" in ran.stdout
    assert "died in test_dying.py::test_that_ends_its_worker" in ran.stdout
    assert " failed" in ran.stdout.splitlines()[-1]
    assert (tmp_path / "times").read_text() == "once"
