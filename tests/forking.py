"""Processes for tests, forked by one that has imported what servers import.

A fresh interpreter computes for three seconds until it has imported torch and numba. A pytest worker has one
process (`multiprocessing` calls it a fork server) that does so once, starts no thread, and forks from then on.
It ends with the worker.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from multiprocessing import forkserver, util
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

RANKS = "tests.e2e.forked_ranks"
"""What the fork server imports. Not to be imported in pytest's own process."""
RESHAPES = "RESHAPES"
"""The variable with the path of the socket on which a head takes divisions of its layers (`forked_ranks`)."""

# How the names of variables begin that are read while libraries and kernels are imported.
_READ_AT_IMPORT = ("PPSERVE_CPU_", "NUMBA_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "ATEN_", "LD_", "PYTHON")

_context = multiprocessing.get_context("forkserver")
_starting = threading.Lock()
_imported_with: dict[str, str] = {}


def fork(function: Any, *args: Any) -> ForkServerProcess:
    """A process that calls the function, which is pickled by its name; ended by its caller."""
    _start()
    process = _context.Process(target=function, args=args, daemon=True)
    process.start()
    return process


def _start() -> None:
    with _starting:
        if _imported_with:
            return
        # Otherwise BLAS starts threads when it is imported, and a process with threads does not fork well.
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
            _context.set_forkserver_preload([RANKS])
            forkserver.ensure_running()
            _imported_with.update(os.environ)
        # Waited for, after the processes that are ended with this one, so that its time counts as this one's.
        util.Finalize(None, forkserver._forkserver._stop, exitpriority=-1)  # type: ignore[attr-defined]


class ForkedLauncher:
    """A process that starts ranks: of a `subprocess.Popen`, what `Server` uses.

    function: of `tests.e2e.forked_ranks`; it is called with what to start, the environment, and the log's path.
    """

    def __init__(self, function: str, what: object, environment: Mapping[str, str], log: Path) -> None:
        """Raises AssertionError where a variable that is read at import has another value than it had then: such a
        server needs fresh interpreters."""
        _start()
        differing = {name for name, _ in environment.items() ^ _imported_with.items()}
        names = [name for name in differing if name.startswith(_READ_AT_IMPORT)]
        if function == "run_torchrun":  # which reads none of ours; its ranks are fresh interpreters
            names = [name for name in names if not name.startswith("PPSERVE_")]
        assert not names, f"start this server with torchrun: {names} are read at import"
        self._process = fork(_call, RANKS, function, what, dict(environment), log)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("a forked launcher", timeout)
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _call(module: str, function: str, *args: Any) -> None:
    """Call a function of a module that pytest's process must not import."""
    sys.exit(getattr(import_module(module), function)(*args))
