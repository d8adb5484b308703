"""Signals that come before a process can end in order: no traceback, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ppserve.process.lifetime import ending_with_us

ROOT = Path(__file__).parents[2]

# Modules of C and Cython turn an interrupt into errors of their own.
SLOW_MODULE = """
import time
try:
    print("importing", flush=True)
    while True:
        time.sleep(0.05)  # a signal before one long pause would be noticed after it
except BaseException:
    raise ImportError("interrupted") from None
"""
# The interpreter of a rank has begun, and ppserve in it has not, until Ctrl-C has come.
SLOW_RANK = """
import os, signal, time
if "RANK" in os.environ:
    print("rank", os.environ["RANK"], flush=True)
    while signal.SIGINT not in signal.sigpending():
        time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("slow", "command"),
    [("click", "-m ppserve generate hi"), ("click", "-m ppserve serve"), ("torch", "demo.py --force-cpu")],
)
def test_ctrl_c_ends_a_command_in_silence_while_it_imports(slow: str, command: str, tmp_path: Path) -> None:
    (tmp_path / f"{slow}.py").write_text(SLOW_MODULE)
    begun = begin(*command.split(), path=tmp_path)
    assert begun.stdout is not None
    assert begun.stdout.readline() == "importing\n"
    begun.send_signal(signal.SIGINT)
    assert (*begun.communicate(timeout=60), begun.returncode) == ("", "", 130)


@pytest.mark.slow
def test_ctrl_c_before_the_ranks_have_begun_ends_them_in_silence(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_RANK)
    ports = ("--port", "0", "--http-port", "0", "--metrics-port", "0")
    begun = begin("-m", "ppserve", "serve", "--stages", "2", *ports, path=tmp_path)
    assert begun.stdout is not None
    assert {begun.stdout.readline() for _ in range(2)} == {"rank 0\n", "rank 1\n"}
    begun.send_signal(signal.SIGINT)
    _, errors = begun.communicate(timeout=90)
    assert [line for line in errors.splitlines() if not line.startswith("starting, ")] == []


def begin(*arguments: str, path: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *arguments], stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=environment
    )


def test_a_command_that_was_started_to_ignore_ctrl_c_ignores_it() -> None:
    """A shell starts those in its background so."""
    script = (
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from ppserve.process import interrupts\n"
        "interrupts.end_at_interrupt()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "interrupts.raise_at_interrupt()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0


def test_the_first_signal_leaves_in_order_and_further_ones_do_not_disturb() -> None:
    script = (
        "import os, signal\n"
        "from ppserve.process.interrupts import exit_at_signals\n"
        "exit_at_signals()\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "finally:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('ended in order')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGHUP, "ended in order\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_the_kernel_ends_a_command_when_its_starter_is_killed(by: signal.Signals) -> None:
    sleeping = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(600)"]
    starter = f"import subprocess, sys; subprocess.run({ending_with_us(sleeping, by)!r})"
    starter = starter.replace(f"'{os.getpid()}'", "str(__import__('os').getpid())")
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.kill()
        assert process.stdout.read() == "", "the pipe ends with the last process that holds it"
