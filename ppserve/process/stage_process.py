"""A stage process as its keeper sees it: started, handed its configuration, listened to, and ended."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Sequence

from ppserve import wire

STAGE_COMMAND = (sys.executable, "-m", "ppserve.stage")


class StageProcess:
    """One child process. It imports torch first (seconds), then waits for `start`: until then it is a spare.

    The child gets two arguments: the file descriptor of a pipe to this process, and this process's id. It writes
    lines to the pipe: an empty one at least every half second, `started` when it has read its configuration,
    `connected` when it has found the head, `ready` when it has entered an epoch, `served` when it has computed
    its first step. The pipe's end is the child's end.
    """

    def __init__(self, command: Sequence[str] = STAGE_COMMAND) -> None:
        self._life, write = os.pipe()
        self._line = b""
        self._process = subprocess.Popen(
            [*command, str(write), str(os.getpid())], stdin=subprocess.PIPE, pass_fds=(write,), close_fds=True
        )
        os.close(write)

    def start(self, start: wire.Start) -> None:
        """Makes it a stage. Its standard input stays open; closing that ends a spare."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died while it waited; `end` returns the exit code
            self._process.stdin.write(wire.encode(start))
            self._process.stdin.flush()

    def listen(self, timeout_s: float) -> list[str] | None:
        """Complete lines that arrived, waiting up to `timeout_s` for the first; None when the child has ended."""
        readable, _, _ = select.select([self._life], [], [], timeout_s)
        if not readable:
            return []
        received = os.read(self._life, 4096)
        if not received:
            return None
        *lines, self._line = (self._line + received).split(b"\n")
        return [line.decode() for line in lines]

    def kill(self) -> None:
        """SIGKILL; harmless when it has ended. Safe in a signal handler."""
        self._process.kill()

    def end(self) -> int:
        """Closes its input, which ends a spare, and waits for its exit code (-9: killed)."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._life)
        return self._process.wait()
