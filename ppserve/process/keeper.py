"""What a torchrun rank does: keep a stage process alive. Rank 0 runs the head as well.

torchrun ends every rank when one dies, so a rank must not be the process that may die. It is this
small keeper, without torch, and its stage is a child that it starts again when it dies.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque

from ppserve import wire
from ppserve.config import ServeConfig
from ppserve.process.environment import EXIT_FAILED, EXIT_HEAD_GONE, EXIT_USAGE, RankEnvironment, die_with_launcher

# A stage that dies this often within the window, each time before it served, does not come back.
_MAX_DEATHS = 4
_DEATH_WINDOW_S = 60.0
# A stage writes a byte on its pipe at least every half second; silence this long means it is frozen. While it
# imports, a single library may take long to load from a cold disk, and holds everything up meanwhile.
_FROZEN_AFTER_S = 4.0
_FROZEN_WHILE_IMPORTING_S = 30.0


class StageProcess:
    """A stage process, or one in waiting: it imports what is slow to import, then waits for `start`.

    A spare in waiting is what makes the loss of a stage a matter of a second rather than of many.
    """

    def __init__(self) -> None:
        self._life, write = os.pipe()
        self._text = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ppserve.stage", str(write), str(os.getpid())],
            stdin=subprocess.PIPE,
            pass_fds=(write,),
            close_fds=True,
        )
        os.close(write)

    def start(self, start: wire.Start) -> None:
        """Makes it a stage. Its input stays open; the end of it ends a spare."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(wire.encode(start))
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it died in waiting; `end` has the code

    def listen(self, timeout_s: float) -> list[str] | None:
        """What it said, an empty word being a mere sign of life; None when it is gone."""
        readable, _, _ = select.select([self._life], [], [], timeout_s)
        if not readable:
            return []
        received = os.read(self._life, 4096)
        if not received:
            return None
        *lines, self._text = (self._text + received).split(b"\n")
        return [line.decode() for line in lines]

    def end(self) -> int:
        """Waits for the end of one that is ending, and ends a spare; the exit code."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        os.close(self._life)
        return self.process.wait()


class Keeper:
    """Keeps one stage process alive: starts it, watches it, starts it again when it dies.

    Owns the child process. `control` is where the head listens; ranks other than 0 do not know it at
    first and learn it from their stage, which asks the launcher's store.
    """

    def __init__(
        self, config: ServeConfig, stage: int, num_stages: int, control: tuple[str, int, str] = ("", 0, "")
    ) -> None:
        self._config = config
        self._stage = stage
        self._num_stages = num_stages
        self._control = control
        self._child: StageProcess | None = None
        self._spare: StageProcess | None = None
        self._stopping = False
        self._kill_at_s: float | None = None

    def run(self) -> int:
        """Until the stage ends for good; returns the exit code for the rank."""
        try:
            return self._keep()
        finally:
            if self._spare is not None:
                self._spare.process.kill()
                self._spare.end()

    def _keep(self) -> int:
        deaths: deque[float] = deque(maxlen=_MAX_DEATHS)
        while True:
            served, code = self._watch_one_life()
            if code == 0:
                return 0
            if self._stopping and (code == EXIT_HEAD_GONE or self._is_overdue()):
                return 1
            if code in (EXIT_USAGE, EXIT_FAILED):
                return EXIT_USAGE if code == EXIT_USAGE else 1
            now = time.monotonic()
            if served:
                deaths.clear()
            deaths.append(now)
            if len(deaths) == _MAX_DEATHS and now - deaths[0] < _DEATH_WINDOW_S:
                return self._give_up(f"stage {self._stage} died {_MAX_DEATHS} times in a row (last code {code})")

    def stop(self, grace_s: float) -> None:
        """The end is near: for `grace_s` a stage that dies is still replaced, because streams may go on; after
        that it is killed. Safe in a signal handler."""
        at_s = time.monotonic() + grace_s
        self._kill_at_s = at_s if self._kill_at_s is None else min(at_s, self._kill_at_s)
        self._stopping = True
        if self._child is not None and not self._control[1]:
            # It has not found the head and never will.
            self._child.process.kill()

    def _is_overdue(self) -> bool:
        return not self._control[1] or (self._kill_at_s is not None and time.monotonic() > self._kill_at_s)

    def _watch_one_life(self) -> tuple[bool, int]:
        """Starts the stage and waits for its end: (whether it ever served, exit code)."""
        self._child, self._spare = self._spare or StageProcess(), None
        self._child.start(wire.Start(self._config, self._stage, self._num_stages, *self._control))
        served = self._watch(self._child)
        code = self._child.end()
        self._child = None
        return served, code

    def _watch(self, child: StageProcess) -> bool:
        """Reads the stage's signs of life until they end; kills a frozen one. True if it served."""
        served = imported = False
        last_sign_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            words = child.listen(0.5)
            if words is None:
                return served
            if words:
                last_sign_s = time.monotonic()
            for word in words:
                if word.startswith("control "):
                    host, port, token = word.split()[1:]
                    self._control = (host, int(port), token)
                    imported = True
                elif word == "served":
                    served = True
                    if self._spare is None and not self._stopping:
                        # Only now: before, it would compete with the stage's own start.
                        self._spare = StageProcess()
            frozen = now_s - last_sign_s > (_FROZEN_AFTER_S if imported else _FROZEN_WHILE_IMPORTING_S)
            if frozen or (self._stopping and self._is_overdue()):
                child.process.kill()

    def _give_up(self, reason: str) -> int:
        """Tells the head why, so that streams end with a status and not with silence."""
        host, port, token = self._control
        try:
            with socket.create_connection((host, port), timeout=2.0) as connection:
                connection.sendall(wire.encode(wire.GaveUp(token, self._stage, reason)))
        except OSError:
            print(f"ppserve: {reason}", file=sys.stderr, flush=True)
        return 1


def run_keeper(config: ServeConfig, environment: RankEnvironment) -> int:
    """The whole life of a rank other than 0."""
    die_with_launcher()
    keeper = Keeper(config, environment.rank, environment.world_size)
    grace_s = config.server.shutdown_timeout_s + 2.0

    def on_signal(_signum: int, _frame: object) -> None:
        # The head decides when stages stop: running streams may finish first.
        keeper.stop(grace_s)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    # These are for the head; who sends them to all ranks must not end this one, nor (they inherit it) its stage.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return keeper.run()
