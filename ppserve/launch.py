"""What a torchrun rank does: keep a stage process alive. Rank 0 runs the head as well.

torchrun ends every rank when one dies, so a rank must not be the process that may die. It is this
small keeper, without torch, and its stage is a child that it starts again when it dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from ppserve import wire
from ppserve.config import ServeConfig

EXIT_USAGE = 2
# A stage that was told to end because the server fails: not to be started again.
EXIT_FAILED = 76
# A stage that lost its head, or was told to go by a closed connection: worth starting again.
EXIT_HEAD_GONE = 75

# torchrun's own variable: seconds from its SIGTERM to the ranks until it kills them.
LAUNCHER_GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_LAUNCHER_GRACE_S = 30.0

# A stage that dies this often within the window, each time before it served, does not come back.
_MAX_DEATHS = 4
_DEATH_WINDOW_S = 60.0
# A stage writes a byte on its pipe at least every half second; silence this long means it is frozen. While it
# imports, a single library may take long to load from a cold disk, and holds everything up meanwhile.
_FROZEN_AFTER_S = 4.0
_FROZEN_WHILE_IMPORTING_S = 30.0


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """This process among those that torchrun started. restart: how often torchrun restarted the group."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    restart: int

    @classmethod
    def from_environ(cls) -> RankEnvironment | None:
        """None when this process was not started by torchrun."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return None

        def number(name: str, default: int) -> int:
            return int(os.environ.get(name, default))

        rank, world_size = number("RANK", 0), number("WORLD_SIZE", 1)
        return cls(
            rank,
            world_size,
            number("LOCAL_RANK", rank),
            number("LOCAL_WORLD_SIZE", world_size),
            number("TORCHELASTIC_RESTART_COUNT", 0),
        )


def die_with_parent(parent_pid: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent (thread) ends, so that none is orphaned.

    `parent_pid`: who the parent should be; if it is gone already, this process ends at once.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(EXIT_HEAD_GONE)


def die_with_launcher() -> None:
    """In a rank: torchrun's death, even by SIGKILL, is this process's death."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()


def launcher_grace_s() -> float | None:
    """How long torchrun lets ranks go on after it was told to end; None when it is not the launcher.

    Its flag of the same meaning is not shown to ranks; the variable is.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return float(os.environ.get(LAUNCHER_GRACE, _LAUNCHER_GRACE_S))


def this_machine() -> str:
    """Equal for processes that share memory, clock and loopback: the same start of the same kernel, and the
    same network. Machines and containers may bear each other's names, so those alone do not tell."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # only Linux says
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    return "/".join(parts)


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
