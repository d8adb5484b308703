"""A stage process as its keeper sees it: it is forked, configured, watched and ended."""

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
# The two requests to the fork server. It answers REAP with an exit code (-9: killed).
FORK, REAP = b"f", b"r"
EXIT_CODE = struct.Struct("i")
_KILLED = -signal.SIGKILL


class StageLine(StrEnum):
    """The lines that a stage process writes to its keeper. An empty line only says that the process runs."""

    FORKED = "forked"
    """The process exists. Its id follows on the same line."""
    STARTED = "started"
    """The process has read its configuration."""
    DOING = "doing"
    """What the process does until it has found the head. It follows in words on the same line."""
    CONNECTED = "connected"
    """The process has found the head."""
    READY = "ready"
    """The process has entered an epoch."""
    SERVED = "served"
    """The process has computed its first step."""


class ForkServer:
    """A child process that imports once what stages need, which takes seconds, and then forks stages in
    milliseconds.

    It is started with the first stage, and anew after its death, which also ends its stage. The arguments of its
    command are the file descriptor of a socket to this process, and the id of this process.
    """

    def __init__(self, command: Sequence[str] = STAGE_COMMAND) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._prepared: StageProcess | None = None

    def prepare(self) -> None:
        """Begin the imports before the first `fork`. Raises OSError."""
        self._prepared = StageProcess(self)

    def fork(self) -> StageProcess:
        """Start a stage process. The last one must have ended. Raises OSError."""
        prepared, self._prepared = self._prepared, None
        return prepared or StageProcess(self)

    def request_stage(self, stage_end: int) -> None:
        """Request a stage process that gets this end of a socket. Raises OSError."""
        if self._requests is None:
            self._requests = self._start()
        try:
            socket.send_fds(self._requests, [FORK], [stage_end])
        except (BrokenPipeError, ConnectionResetError):  # the fork server has died meanwhile
            self.close()
            self.request_stage(stage_end)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        # If a BLAS started threads here, forked stages would not have them.
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
        """Wait until the stage process is gone and its device is free. Return its exit code, or that of the fork
        server if this has died."""
        assert self._process is not None
        assert self._requests is not None
        code = b""
        self._process.send_signal(signal.SIGCONT)  # in case somebody has stopped it
        with contextlib.suppress(OSError):
            self._requests.sendall(REAP)
            code = self._requests.recv(EXIT_CODE.size)
        return EXIT_CODE.unpack(code)[0] if code else self.close()

    def kill(self) -> None:
        """Kill the fork server and its stage, if they live. It may be called in a signal handler."""
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> int:
        """Kill the fork server, unless it has ended. Return its exit code (-9: killed)."""
        if self._process is None or self._requests is None:
            return _KILLED
        self._requests.close()
        self._process.kill()
        code = self._process.wait()
        self._process = self._requests = None
        return code


class StageProcess:
    """One process that computes for a stage. It first waits for `start`.

    It writes the lines of `StageLine` to a socket, and an empty line at least every half second, also while the
    fork server imports. The socket ends when the process ends.
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
        """Send the process its configuration, so that it becomes a stage."""
        # It has died; `reap` will return its code.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._stage.sendall(wire.encode(start))

    def listen(self, timeout_s: float) -> list[str] | None:
        """Wait up to `timeout_s` for lines, and return those that have arrived; None: the process has ended."""
        waiting = select.poll()  # unlike `select`, it takes descriptors from 1024 on
        waiting.register(self._stage, select.POLLIN)
        if not waiting.poll(1e3 * timeout_s):
            return []
        try:
            received = self._stage.recv(4096)
        except ConnectionResetError:  # the process has ended without reading everything
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
        """Kill the process, unless it has ended. It may be called in a signal handler."""
        if self._pid is None:
            self._server.kill()  # it may still be importing
        elif not self._has_ended:
            # No other process can have this id, because this one has not been reaped yet.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def reap(self) -> int:
        """Return the exit code of a process whose socket has ended (-9: killed)."""
        self._has_ended = True
        self._stage.close()
        return self._server.reap_stage()
