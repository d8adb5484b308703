"""The end of a server's process: with which other process, by which signals, and what its exit code means."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import signal
import sys
from collections.abc import Iterator, Sequence

EXIT_USAGE = 2
"""The operator's configuration is at fault."""
EXIT_HEAD_GONE = 75
"""The stage lost the head: its keeper restarts it."""
EXIT_FAILED = 76
"""The head told the stage to end because the server fails: no restart."""

HEAD_SIGNALS = (signal.SIGHUP, signal.SIGUSR1)
"""Signals that all ranks get and that must not end any. The head installs its handlers for them later."""
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, *HEAD_SIGNALS)
"""Signals that a child ignores if its parent decides when it ends."""

_PR_SET_PDEATHSIG = 1  # Linux's number


def die_with_parent(parent_pid: int | None = None, by: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when the thread that started it ends. It ends at once if the
    process `parent_pid` has ended. The first works only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(EXIT_HEAD_GONE)


def ending_with_us(command: Sequence[str], by: signal.Signals = signal.SIGKILL) -> list[str]:
    """Return a command that runs `command` so that the kernel sends it a signal when the thread that starts it
    ends. It is a command and no `preexec_fn`, whose fork may lock up in a process with threads of gRPC."""
    return [sys.executable, "-IS", __file__, str(os.getpid()), str(int(by)), *command]


def name_run() -> str:
    """Return the name of a run of torchrun's agent in this process."""
    return f"ppserve.{os.getpid()}.{secrets.token_hex(8)}"


def die_with_launcher() -> None:
    """Let the kernel end this rank when torchrun dies, even by SIGKILL. Do so before imports that take time: only
    where `name_run` has named the run is a launcher noticed that has died before."""
    if (run := os.environ.get("TORCHELASTIC_RUN_ID")) is not None:
        named = re.match(r"ppserve\.(\d+)\.", run)
        die_with_parent(int(named[1]) if named else None)


@contextlib.contextmanager
def signals_blocked(signals: Sequence[signal.Signals] = ENDING_SIGNALS) -> Iterator[None]:
    """Block signals. A child that is started meanwhile gets none until it unblocks them, as `ignore_signals`
    does."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals(signals: Sequence[signal.Signals]) -> None:
    """Ignore these signals, also those that `signals_blocked` has held back."""
    for signum in signals:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


if __name__ == "__main__":  # a command of `ending_with_us`
    die_with_parent(int(sys.argv[1]), signal.Signals(int(sys.argv[2])))
    os.execvp(sys.argv[3], sys.argv[3:])
