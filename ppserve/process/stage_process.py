"""A stage process as its keeper sees it: forked, configured, watched, and ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from enum import StrEnum

from ppserve import wire
from ppserve.process.lifetime import signals_blocked

STAGE_COMMAND = (sys.executable, "-m", "ppserve.stage")
# What the fork server is asked, and its answer to REAP: an exit code (-9: killed).
FORK, REAP = b"f", b"r"
EXIT_CODE = struct.Struct("i")
_KILLED = -signal.SIGKILL


class StageLine(StrEnum):
    """What a stage process writes to its keeper, a line each. An empty line says only that it runs."""

    FORKED = "forked"
    """It exists; its process id follows on the same line."""
    STARTED = "started"
    """It has read its configuration."""
    CONNECTED = "connected"
    """It has found the head."""
    READY = "ready"
    """It has entered an epoch."""
    SERVED = "served"
    """It has computed its first step."""


class ForkServer:
    """A child process that imports what stages import once, which takes seconds, and forks stages in milliseconds.

    Started with the first stage, and again after its death, which ends its stage too.
    Its command's arguments: the file descriptor of a socket to this process, and this process's id.
    """

    def __init__(self, command: Sequence[str] = STAGE_COMMAND) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._prepared: StageProcess | None = None

    def prepare(self) -> None:
        """Start the imports for the first `fork`. Raises OSError."""
        self._prepared = StageProcess(self)

    def fork(self) -> StageProcess:
        """Start the next stage process, after the last one's end. Raise OSError."""
        prepared, self._prepared = self._prepared, None
        return prepared or StageProcess(self)

    def request_stage(self, stage_end: int) -> None:
        """Request a stage that gets this end of a socket. Raises OSError."""
        if self._requests is None:
            self._requests = self._start()
        try:
            socket.send_fds(self._requests, [FORK], [stage_end])
        except (BrokenPipeError, ConnectionResetError):  # it has died since the last one
            self.close()
            self.request_stage(stage_end)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        # A BLAS that starts threads would leave the forked stages without them.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        command = [*self._command, str(theirs.fileno()), str(os.getpid())]
        with theirs, signals_blocked():
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), env=environment
                )
            except OSError:
                ours.close()
                raise
        return ours

    def reap_stage(self) -> int:
        """Wait until the stage's device is free. Returns its exit code, or the server's."""
        assert self._process is not None
        assert self._requests is not None
        code = b""
        self._process.send_signal(signal.SIGCONT)  # in case it was stopped
        with contextlib.suppress(OSError):
            self._requests.sendall(REAP)
            code = self._requests.recv(EXIT_CODE.size)
        return EXIT_CODE.unpack(code)[0] if code else self.close()

    def kill(self) -> None:
        """Kill it, if it lives, with its stage. Safe in a signal handler."""
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> int:
        """Kill it, unless it has ended, and returns its exit code (-9: killed)."""
        if self._process is None or self._requests is None:
            return _KILLED
        self._requests.close()
        self._process.kill()
        code = self._process.wait()
        self._process = self._requests = None
        return code


class StageProcess:
    """One process that computes for a stage. It waits for `start` first.

    It writes lines to a socket: those of `StageLine`, and an empty one at least every half second, also while the
    fork server imports. The socket's end is the process's end.
    """

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._pid: int | None = None
        self._line = b""
        self._has_ended = False
        self._stage, theirs = socket.socketpair()
        with theirs:
            try:
                server.request_stage(theirs.fileno())
            except OSError:
                self._stage.close()
                raise

    def start(self, start: wire.Start) -> None:
        """Make it a stage."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died; `reap` tells
            self._stage.sendall(wire.encode(start))

    def listen(self, timeout_s: float) -> list[str] | None:
        """Return the lines that have arrived, after waiting up to `timeout_s` for the first; None at the end."""
        waiting = select.poll()  # unlike `select`, also for descriptors from 1024 on
        waiting.register(self._stage, select.POLLIN)
        if not waiting.poll(1e3 * timeout_s):
            return []
        try:
            received = self._stage.recv(4096)
        except ConnectionResetError:  # it has ended without reading all
            received = b""
        if not received:
            return None
        *lines, self._line = (self._line + received).split(b"\n")
        for line in lines:
            first, _, pid = line.partition(b" ")
            if first.decode() == StageLine.FORKED:
                self._pid = int(pid)
        return [line.decode() for line in lines]

    def kill(self) -> None:
        """Kill it. Does nothing when it has ended. Safe in a signal handler."""
        if self._pid is None:
            self._server.kill()  # it may still import
        elif not self._has_ended:
            # No other process can have this id: this one is not reaped yet.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def reap(self) -> int:
        """Return the exit code of a process whose socket has ended (-9: killed)."""
        self._has_ended = True
        self._stage.close()
        return self._server.reap_stage()
