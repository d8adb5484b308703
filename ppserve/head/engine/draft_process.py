"""The draft model's process as the head sees it. When it is gone, nothing is drafted, and nothing else changes."""

from __future__ import annotations

import array
import contextlib
import fcntl
import logging
import os
import select
import subprocess
import sys
import termios
import time
from collections.abc import Sequence

from ppserve import wire
from ppserve.core.plan import Slice
from ppserve.core.scheduling.draft_model import NUM_SLOTS
from ppserve.core.scheduling.drafter import Interrupted
from ppserve.errors import WireError
from ppserve.process.environment import EXIT_USAGE, signals_ignored

log = logging.getLogger("ppserve.head")

DRAFT_COMMAND = (sys.executable, "-m", "ppserve.stage.draft")
WAIT_S = 0.02
"""The longest time for which the engine waits for answers of one step. All requests wait with it."""
_PIPE_BYTES = 1 << 20
# The model may have to be downloaded. A server without draft tokens is better than none.
_LOADED_WITHIN_S = 600.0


class DraftProcess:
    """A `DraftChannel` to a child process; used by one thread, but for `end`.

    wakes: no answer is waited for while one of these files has something to read: requests that arrive go first.
    max_positions: 0, so that nothing is asked, until the model is loaded and after the process is lost.
    """

    def __init__(
        self, path: str, of: str, command: Sequence[str] = DRAFT_COMMAND, wakes: Sequence[int] = ()
    ) -> None:
        self._wakes = wakes
        self._max_positions = 0
        self._answers: list[tuple[int, ...]] = []
        self._reader = wire.FrameReader(wire.FromDraft)
        self._is_lost = False
        # How long it was waited for in all, and until the last question of each slot. A step asks a slot once, so
        # what was waited since then is at least what was waited in this step.
        self._waited_s, self._waited_before_s = 0.0, [0.0] * NUM_SLOTS
        self._slot, self._left_s = 0, WAIT_S
        with signals_ignored():
            self._process = subprocess.Popen(
                [*command, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
        assert self._process.stdin is not None and self._process.stdout is not None  # noqa: PT018
        self._questions, self._frames = self._process.stdin, self._process.stdout
        # The engine's thread never waits for a process that does not read.
        os.set_blocking(self._questions.fileno(), False)
        with contextlib.suppress(OSError, AttributeError):  # not every system lets a pipe hold more
            fcntl.fcntl(self._questions, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._send(wire.DraftStart(path, of))

    @property
    def max_positions(self) -> int:
        if not self._max_positions:
            self._listen(0.0)
        return 0 if self._is_lost else self._max_positions

    def ask(self, piece: Slice, count: int) -> None:
        self._slot = slot = piece.sequence_id
        self._left_s = max(0.0, WAIT_S - (self._waited_s - self._waited_before_s[slot]))
        self._waited_before_s[slot] = self._waited_s
        self._send(wire.DraftQuestion(piece, count))

    def answer(self, *, wait: bool) -> tuple[int, ...] | None:
        if not self._answers:
            began_s = time.monotonic()
            self._listen(self._left_s if wait else 0.0)
            self._waited_s += time.monotonic() - began_s
            self._waited_before_s[self._slot] = self._waited_s
            if wait and not self._answers and not self._is_lost and select.select(self._wakes, [], [], 0)[0]:
                self._send(wire.DraftStop())  # it may need the core
                raise Interrupted
        return self._answers.pop() if self._answers else None

    def refused(self) -> bool:
        """Waits until the model is loaded or the process is gone. Whether it cannot be used with these flags; then
        it has said why. In any thread, before anything is asked."""
        with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):  # `end` may have closed the pipe
            select.select([self._frames], [], [], _LOADED_WITHIN_S)
            unread = array.array("i", [0])
            fcntl.ioctl(self._frames, termios.FIONREAD, unread)
            return unread[0] == 0 and self._process.wait(30) == EXIT_USAGE
        return False

    def end(self) -> None:
        """Ends the process."""
        self._is_lost = True
        self._process.kill()
        self._process.wait()
        self._questions.close()
        self._frames.close()

    def _send(self, message: wire.ToDraft) -> None:
        """A question is smaller than what the pipe holds, unless the context has tens of thousands of tokens, and
        only one is open. What does not fit would be half a frame."""
        if self._is_lost:
            return
        frame = wire.encode(message)
        try:
            if self._questions.write(frame) != len(frame):
                self._lose()
        except OSError:
            self._lose()

    def _listen(self, timeout_s: float) -> None:
        """Takes what has arrived, waiting for it that long."""
        if self._is_lost:
            return
        frames = self._frames.fileno()
        if frames not in select.select([frames, *self._wakes], [], [], timeout_s)[0]:
            return
        with contextlib.suppress(OSError, WireError):
            if received := os.read(frames, 1 << 16):
                for message in self._reader.feed(received):
                    match message:
                        case wire.DraftReady(max_positions):
                            self._max_positions = max_positions
                        case wire.Drafted(token_ids):
                            self._answers.append(token_ids)
                return
        self._lose()

    def _lose(self) -> None:
        if not self._is_lost:
            log.warning("the draft model's process is gone: nothing is drafted any more")
            self._process.kill()
        self._is_lost = True
