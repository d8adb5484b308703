"""What a torchrun rank does: keep a stage process alive. Rank 0 runs the head as well.

torchrun ends every rank when one rank ends, so a rank must not be the process that may crash. The rank is
this keeper, which never imports torch; its stage is a child process that it replaces when that ends or freezes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from ppserve import wire
from ppserve.config import ServeConfig
from ppserve.errors import UsageError
from ppserve.process.environment import EXIT_FAILED, EXIT_HEAD_GONE, EXIT_USAGE
from ppserve.process.greeting import connect_to_head
from ppserve.process.patience import Life, Patience
from ppserve.process.stage_process import ForkServer, StageProcess, start_patiently

# A stage sends a sign of life at least every half second; after this long without one it is killed as frozen.
FROZEN_AFTER_S = 4.0
# Until it knows the head: loading a library from a cold disk, or making a GPU's context, holds up all threads.
FROZEN_WHILE_PREPARING_S = 30.0
# For telling the head that the stage keeps dying.
_TELL_WITHIN_S = 2.0
# How often the keeper looks whether a stage is frozen or a stop is overdue.
_LOOK_EVERY_S = 0.5


class Keeper:
    """Keeps one stage process alive. Owns that and the fork server it comes from. clock: seconds, monotonic."""

    def __init__(
        self,
        config: ServeConfig,
        rank: int,
        world_size: int,
        meeting: wire.Meeting,
        fork_server: ForkServer | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._config = config
        self._rank, self._world_size = rank, world_size
        self._meeting = meeting
        self._found_head = self._was_ready = False
        self._clock, self._sleep = clock, sleep
        self._fork_server = fork_server or ForkServer()
        self._child: StageProcess | None = None
        self._stopping = False
        self._kill_at_s: float | None = None

    def run(self) -> int:
        """Until the stage ends for good; returns the rank's exit code. Raises OSError if none can be started."""
        try:
            return self._keep()
        finally:
            self._fork_server.end()

    def stop(self, grace_s: float) -> None:
        """The server stops. For `grace_s` a stage that dies is still replaced, because running streams may
        finish; after that the stage is killed. At once, if it has lost the head. Safe in a signal handler."""
        at_s = self._clock() + grace_s
        self._kill_at_s = at_s if self._kill_at_s is None else min(at_s, self._kill_at_s)
        self._stopping = True
        child = self._child
        if child is not None and not self._found_head:
            # It has not found the head, or has lost it, and never will.
            child.kill()

    def _is_overdue(self) -> bool:
        """Whether a stop has lasted longer than it may. Where there is no head, it may take no time."""
        if not self._stopping:
            return False
        return not self._found_head or (self._kill_at_s is not None and self._clock() > self._kill_at_s)

    def _keep(self) -> int:
        patience = Patience(self._name, self._clock())
        while True:
            life, code = self._one_life()
            if code == 0:
                return 0
            if code == EXIT_HEAD_GONE:
                self._found_head = False  # torchrun waits for this rank to end before it starts another head
            if self._is_overdue():
                return 1
            if code == EXIT_USAGE:
                return self._for_good(EXIT_USAGE)
            if code == EXIT_FAILED:
                return 1
            if reason := patience.ended(life, code, self._clock()):
                return self._give_up(reason)
            until_s = self._clock() + patience.pause_s(life)
            while self._clock() < until_s and not self._is_overdue():
                self._sleep(_LOOK_EVERY_S)

    def _one_life(self) -> tuple[Life, int]:
        """Starts a stage and waits for its end: (what it said, exit code)."""
        start = self._fork_server.fork, self._name, self._is_overdue, self._clock, self._sleep
        child = self._child = start_patiently(*start)
        child.start(wire.Start(self._config, self._rank, self._world_size, self._meeting))
        life = self._watch(child)
        code = child.end()
        self._child = None
        return life, code

    def _watch(self, child: StageProcess) -> Life:
        """Listens to the stage until it has ended; kills a frozen one."""
        life = Life()
        last_sign_s = self._clock()
        while True:
            # Before listening: if this process was held up itself, the signs of life are in the pipe by now.
            now_s = self._clock()
            lines = child.listen(_LOOK_EVERY_S)
            if lines is None:
                return life
            if lines:
                last_sign_s = self._clock()
            for line in lines:
                if line == "connected":
                    self._found_head = life.is_connected = True
                elif line == "ready":
                    self._was_ready = life.is_ready = True
                elif line == "served":
                    life.served = True
            frozen = now_s - last_sign_s > (FROZEN_AFTER_S if life.is_connected else FROZEN_WHILE_PREPARING_S)
            if frozen or self._is_overdue():
                child.kill()

    @property
    def _name(self) -> str:
        return self._config.pipeline.rank_name(self._rank, self._world_size)

    def _give_up(self, reason: str) -> int:
        """Tells the head why, so that streams end with a status instead of waiting."""
        try:
            with connect_to_head(self._meeting, self._rank, _TELL_WITHIN_S) as connection:
                connection.sendall(wire.encode(wire.GaveUp(reason)))
        except (OSError, UsageError):
            print(f"ppserve: {reason}", file=sys.stderr, flush=True)
        return self._for_good(1)

    def _for_good(self, code: int) -> int:
        """The exit code of a rank whose stage does not come back: 0 where other replicas may go on without it,
        because torchrun ends all ranks when one fails. Where none does, and until all have formed, the head fails.
        """
        pipeline = self._config.pipeline
        return 0 if self._was_ready and (pipeline.replicas > 1 or pipeline.parallel == "auto") else code
