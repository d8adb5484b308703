"""Processes that run another person's program or text with little time and memory, so that they cannot harm their
parent.

Parent and process exchange lines of text: a first line from the parent, then a question and an answer in turn.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from ppserve.errors import PpserveError

MAX_IDLE_BYTES = 256 << 20
"""A process that holds more memory after an answer is ended, so that its memory is free again."""


class OutOfTime(PpserveError):
    """The process was ended because an answer took too long."""


class OutOfMemory(PpserveError):
    """The process ended by itself in the middle of an answer, because it could get no more memory or stack."""


class LimitedProcesses:
    """Processes that run one module. Any thread may ask. A process is started when all others are answering."""

    def __init__(self, module: str, begin: str) -> None:
        """module: the module that a process runs, whose `main` calls `serve`. begin: each process's first line."""
        self._module = module
        self._begin = begin
        self._idle: list[subprocess.Popen[str]] = []

    def ask(self, question: str) -> str:
        """Ask a question of one line, wait, and return the answer. Raises OutOfTime or OutOfMemory; then the
        process has ended, and the next question goes to another one."""
        try:
            process = self._idle.pop()
        except IndexError:
            process = self._start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            print(question, file=process.stdin, flush=True)
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        if not answer.endswith("\n"):
            raise _cause(process)
        if psutil.Process(process.pid).memory_info().rss > MAX_IDLE_BYTES:
            _end(process)
        else:
            self._idle.append(process)
        return answer

    def close(self) -> None:
        """End the idle processes. Those that are answering end when this process ends."""
        while self._idle:
            _end(self._idle.pop())

    def _start(self) -> subprocess.Popen[str]:
        # It has a session of its own, so Ctrl-C reaches only the parent; the process ends with it.
        process = subprocess.Popen(
            [sys.executable, "-m", self._module], text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        print(self._begin, file=process.stdin)
        return process


def _cause(process: subprocess.Popen[str]) -> PpserveError:
    """Wait for a process that has closed its output, and return the error that says why it ended."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)
    _end(process)
    return OutOfTime() if process.returncode == -signal.SIGPROF else OutOfMemory()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def serve(
    begin: Callable[[str], Callable[[str], str]], max_cpu_s: float, max_memory_bytes: int, niceness: int = 0
) -> None:
    """Answer questions until standard input ends, which it does with the parent. begin: is called with the first
    line, and returns the function that answers. niceness: how much less urgent than its parent the process is."""
    resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(niceness)
    with suppress(OSError):  # Linux may share the CPUs out among sessions; this process has one of its own
        Path("/proc/self/autogroup").write_text(str(niceness))
    answered = begin(sys.stdin.readline())
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
        answer = answered(line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)
