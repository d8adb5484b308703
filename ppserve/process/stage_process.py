"""A stage process as its keeper sees it: started, handed its configuration, listened to, and ended."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Callable, Sequence

from ppserve import wire

STAGE_COMMAND = (sys.executable, "-m", "ppserve.stage")
# The system may have no descriptor, process or memory left for a while.
START_WITHIN_S = 60.0
_START_EVERY_S = 0.5


class StageProcess:
    """One child process. It imports torch first (seconds), then waits for `start`: until then it is a spare.

    The child gets two arguments: the file descriptor of a pipe to this process, and this process's id. It writes
    lines to the pipe: an empty one at least every half second, `started` when it has read its configuration,
    `connected` when it has found the head, `ready` when it has entered an epoch, `served` when it has computed
    its first step. The pipe's end is the child's end. Raises OSError, and leaves nothing open, if it cannot be
    started.
    """

    def __init__(self, command: Sequence[str] = STAGE_COMMAND) -> None:
        self._life, write = os.pipe()
        self._line = b""
        arguments = [*command, str(write), str(os.getpid())]
        try:
            self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, pass_fds=(write,), close_fds=True)
        except OSError:
            os.close(self._life)
            raise
        finally:
            os.close(write)

    def start(self, start: wire.Start) -> None:
        """Makes it a stage. Its standard input stays open; closing that ends a spare."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died while it waited; `end` returns the exit code
            self._process.stdin.write(wire.encode(start))
            self._process.stdin.flush()

    def listen(self, timeout_s: float) -> list[str] | None:
        """Complete lines that arrived, waiting up to `timeout_s` for the first; None when the child has ended."""
        waiting = select.poll()  # unlike `select`, also for descriptors from 1024 on
        waiting.register(self._life, select.POLLIN)
        if not waiting.poll(1e3 * timeout_s):
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


def start_patiently(
    spawn: Callable[[], StageProcess],
    name: str,
    is_over: Callable[[], bool],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> StageProcess:
    """Starts the process of the stage of this name. Raises OSError when the system could not for START_WITHIN_S,
    or when `is_over` says that nobody needs it any more."""
    since_s, is_told = clock(), False
    while True:
        try:
            return spawn()
        except OSError as error:
            if is_over() or clock() - since_s >= START_WITHIN_S:
                raise
            if not is_told:
                print(f"ppserve: {name} cannot be started yet: {error}", file=sys.stderr, flush=True)
                is_told = True
        sleep(_START_EVERY_S)
