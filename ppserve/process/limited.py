"""Processes that do what another person's program or text asks, in little time and memory: they cannot hurt their
parent.

Parent and process speak lines of text: one that begins, then a question and an answer in turn.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import psutil

from ppserve.errors import PpserveError

MAX_IDLE_BYTES = 256 << 20
"""A process that holds more behind an answer is ended, so that its memory returns."""


class OutOfTime(PpserveError):
    """The process was ended because an answer took too long."""


class OutOfMemory(PpserveError):
    """The process ended by itself in the middle of an answer: it could get no more memory, or stack."""


class LimitedProcesses:
    """Processes of one module, for any threads. Each is started when all others have a question."""

    def __init__(self, module: str, begin: str) -> None:
        """module: its `main` calls `serve`. begin: the first line that each process gets."""
        self._module = module
        self._begin = begin
        self._idle: list[subprocess.Popen[str]] = []

    def ask(self, question: str) -> str:
        """Return the answer to a line. Blocks. Raises OutOfTime or OutOfMemory; the next question gets another
        process."""
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
        """End the idle processes; the others end with this one."""
        while self._idle:
            _end(self._idle.pop())

    def _start(self) -> subprocess.Popen[str]:
        # A session of its own: Ctrl-C is for the parent, with which it ends.
        process = subprocess.Popen(
            [sys.executable, "-m", self._module], text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        print(self._begin, file=process.stdin)
        return process


def _cause(process: subprocess.Popen[str]) -> PpserveError:
    """Return why a process that has closed its output ends."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)
    _end(process)
    return OutOfTime() if process.returncode == -signal.SIGPROF else OutOfMemory()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def serve(begin: Callable[[str], Callable[[str], str]], max_cpu_s: float, max_memory_bytes: int) -> None:
    """Answer until standard input ends, with the parent. begin: takes the first line, and returns what
    answers."""
    resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answered = begin(sys.stdin.readline())
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
        answer = answered(line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)
