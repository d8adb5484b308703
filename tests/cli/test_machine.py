"""Machines that cannot run a server: one line names the cause, at once, with exit code 2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")]

needs_root = pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare")
PIDS = Path("/sys/fs/cgroup/pids")

NO_EXECUTABLE_MEMORY = """if True:
    import ctypes, os, sys
    if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):
        sys.exit("this kernel has no PR_SET_MDWE")
    os.execv(sys.argv[1], sys.argv[1:])
"""
READ_ONLY = """
for place in /tmp /var/tmp; do mount --bind $place $place; mount -o remount,ro,bind $place; done
exec "$@"
"""


def refused(inside: Sequence[str], **environment: str) -> str:
    """What a server of two stages says that is started by this command."""
    command = [*inside, sys.executable, "-m", "ppserve", "serve", "--stages", "2", "--port", "0"]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environment}
    )
    if "this kernel has no" in ended.stderr:
        pytest.skip(ended.stderr)
    (line,) = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout) == (2, ""), line
    return line.removeprefix("ppserve: error: ")


def test_no_executable_memory() -> None:
    line = refused([sys.executable, "-c", NO_EXECUTABLE_MEMORY])
    assert line.startswith("kernels need executable memory, which this system does not give: Permission denied (")


@needs_root
def test_no_loopback() -> None:
    assert "the loopback interface is down" in refused(["unshare", "-n"])


@needs_root
def test_nowhere_to_write() -> None:
    """Nothing is written in the working directory either, which Python then takes for a temporary one."""
    places = {
        "HOME": "/proc",
        "XDG_CACHE_HOME": "",
        "XDG_RUNTIME_DIR": "/proc",
        "TMPDIR": "",
        "NUMBA_CACHE_DIR": "",
    }
    line = refused(["unshare", "-m", "sh", "-c", READ_ONLY, "sh"], **places)
    assert line.startswith("NUMBA_CACHE_DIR: no directory for compiled kernels")
    assert "tried /proc/.cache/ppserve, /tmp/ppserve-0, /var/tmp/ppserve-0" in line


@pytest.mark.skipif(not os.access(PIDS, os.W_OK), reason="needs root and a cgroup (version 1) for processes")
def test_too_few_processes_and_threads() -> None:
    group = PIDS / f"ppserve-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "pids.max").write_text("30")
        line = refused(["sh", "-c", f'echo $$ >{group}/tasks; exec "$@"', "sh"])
    finally:
        group.rmdir()
    assert line.startswith("2 ranks need 48 processes and threads; 29 may be started (pids.max")
