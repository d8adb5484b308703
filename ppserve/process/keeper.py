"""What a torchrun rank does: keep a stage process alive. Rank 0 runs the head as well.

torchrun ends all ranks when one ends, so a rank must not crash. A rank is this keeper, which never imports torch.
Its stage is a child process, which it replaces when the child ends or freezes.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

from ppserve import wire
from ppserve.config import ServeConfig
from ppserve.errors import UsageError
from ppserve.process.environment import RankEnvironment
from ppserve.process.handshake import connect_to_head
from ppserve.process.head_endpoint import find_head_endpoint
from ppserve.process.lifetime import EXIT_FAILED, EXIT_HEAD_GONE, EXIT_USAGE
from ppserve.process.stage_process import ForkServer, StageLine, StageProcess

# A stage gives a sign of life every half second. Without one for so long, it is killed.
FROZEN_AFTER_S = 4.0
# The same before the stage has found the head, because cold disks and GPU contexts block all of its threads.
FROZEN_WHILE_PREPARING_S = 30.0
# So many deaths in a row, without a computed step between them, end the rank. Two requests that kill their stage,
# cut links and a killed head together cause fewer.
MAX_DEATHS = 10
# A stage that ends because it finds no head is replaced for so long.
HEADLESS_FOR_S = 900.0
# If a stage dies before it has found the head, the keeper waits so much longer after each further death in a row.
# The cause may pass (no process or memory left, a device still in use), and a fork takes only milliseconds.
_LONGER_S = 1.0
# How long the keeper tries to tell the head that the stage keeps dying.
_REPORT_WITHIN_S = 2.0
# How often the keeper looks for a frozen stage or an overdue stop.
_CHECK_EVERY_S = 0.5


def run_rank(config: ServeConfig, environment: RankEnvironment) -> int:
    """Keep the stage of a rank other than 0 alive. Return the rank's exit code. Raises UsageError."""
    keeper = Keeper(config, environment.rank, environment.world_size, find_head_endpoint(config, environment))
    grace_s = config.server.shutdown_timeout_s + 2.0
    for signum in (signal.SIGTERM, signal.SIGINT):
        # The head decides when stages stop: streams may finish first.
        signal.signal(signum, lambda *_: keeper.stop(grace_s))
    return keeper.run()


Reported = set[str]
"""The lines that a stage process has written (`StageProcess`)."""


class RestartPolicy:
    """Decides how often a rank's stage is replaced. name: the rank's, for messages. now_s: on a monotonic
    clock."""

    def __init__(self, name: str, now_s: float) -> None:
        self._name = name
        self._deaths, self._had_head_s = 0, now_s

    def count_death(self, reported: Reported, code: int, now_s: float) -> str | None:
        """Note that a stage process has ended. Return the reason why it is not replaced; None: it is."""
        if StageLine.CONNECTED in reported or code != EXIT_HEAD_GONE:
            # A stage that was ready and lost the head counts as one that served: it may have had no work.
            would_serve = StageLine.SERVED in reported or (StageLine.READY in reported and code == EXIT_HEAD_GONE)
            self._deaths = 1 if would_serve else self._deaths + 1
        if StageLine.CONNECTED in reported:
            self._had_head_s = now_s
        if self._deaths == MAX_DEATHS:
            return f"{self._name} died {MAX_DEATHS} times in a row (last code {code})"
        if now_s - self._had_head_s > HEADLESS_FOR_S:
            return f"{self._name} found no head for {HEADLESS_FOR_S:.0f} s"
        return None

    def pause_s(self, reported: Reported) -> float:
        """Return how long to wait before a process that reported these lines is replaced."""
        return 0.0 if StageLine.CONNECTED in reported else _LONGER_S * max(0, self._deaths - 1)


class Keeper:
    """Owns a stage process and its fork server. clock: monotonic, in seconds."""

    def __init__(
        self,
        config: ServeConfig,
        rank: int,
        world_size: int,
        head_endpoint: wire.HeadEndpoint,
        fork_server: ForkServer | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._config = config
        self._head_endpoint, self._rank = head_endpoint, rank
        self._start = wire.Start(config, rank, world_size, head_endpoint)
        self._name = config.pipeline.grid(world_size).name(rank)
        self._found_head = self._was_ready = False
        self.doing = "importing"
        """What the stage does before it has found the head, in words. Any thread may read it."""
        self._clock, self._sleep = clock, sleep
        self._fork_server = fork_server or ForkServer()
        self._child: StageProcess | None = None
        self._kill_at_s = math.inf  # finite once `stop` was called

    def run(self) -> int:
        """Run the stage, and replace it when it dies. Return the rank's exit code."""
        try:
            return self._keep()
        finally:
            self._fork_server.close()

    def stop(self, grace_s: float) -> None:
        """Stop within `grace_s`, or at once if there is no head. Until then a stage that dies is still replaced,
        because streams may finish. It may be called in a signal handler."""
        self._kill_at_s = min(self._kill_at_s, self._clock() + grace_s)
        child = self._child
        if child is not None and not self._found_head:
            child.kill()

    def _is_overdue(self) -> bool:
        """Return whether stopping has taken too long. Without a head it may take no time."""
        is_stopping = self._kill_at_s < math.inf
        return is_stopping and (not self._found_head or self._clock() > self._kill_at_s)

    def _keep(self) -> int:
        policy = RestartPolicy(self._name, self._clock())
        while True:
            reported, code = self._run_stage()
            if code == 0:
                return 0
            if code == EXIT_HEAD_GONE:
                self._found_head = False  # torchrun starts another head only when this rank has ended
            if self._is_overdue():
                return 1
            if code == EXIT_USAGE:
                return self._final_code(EXIT_USAGE)
            if code == EXIT_FAILED:
                return 1
            if reason := policy.count_death(reported, code, self._clock()):
                return self._give_up(reason)
            until_s = self._clock() + policy.pause_s(reported)
            while self._clock() < until_s and not self._is_overdue():
                self._sleep(_CHECK_EVERY_S)

    def _run_stage(self) -> tuple[Reported, int]:
        """Run one stage process. Return what it reported until its end, and its exit code."""
        try:
            child = self._child = self._fork_server.fork()
        except OSError as error:  # no descriptor, process or memory left
            print(f"ppserve: {self._name} cannot be started now: {error}", file=sys.stderr, flush=True)
            return set(), os.EX_OSERR
        child.start(self._start)
        reported = self._watch(child)
        code = child.reap()
        self._child = None
        return reported, code

    def _watch(self, child: StageProcess) -> Reported:
        """Listen to the stage until it has ended, and return what it reported. Kill it if it is frozen."""
        reported: Reported = set()
        last_sign_s = self._clock()
        while True:
            # The time is read before listening: after the machine was suspended, signs of life still wait in the
            # socket.
            now_s = self._clock()
            lines = child.listen(_CHECK_EVERY_S)
            if lines is None:
                return reported
            if lines:
                last_sign_s = self._clock()
            reported.update(lines)
            self._note_doing(lines)
            self._found_head |= StageLine.CONNECTED in reported
            self._was_ready |= StageLine.READY in reported
            limit_s = FROZEN_AFTER_S if StageLine.CONNECTED in reported else FROZEN_WHILE_PREPARING_S
            frozen = now_s - last_sign_s > limit_s
            if frozen or self._is_overdue():
                child.kill()

    def _note_doing(self, lines: Sequence[str]) -> None:
        for line in lines:
            first, _, words = line.partition(" ")
            if first == StageLine.DOING:
                self.doing = words

    def _give_up(self, reason: str) -> int:
        """Tell the head the reason, so that streams end with a status. Return the rank's exit code."""
        try:
            with connect_to_head(self._head_endpoint, self._rank, _REPORT_WITHIN_S) as connection:
                connection.sendall(wire.encode(wire.Failed(reason)))
        except (OSError, UsageError):
            print(f"ppserve: {reason}", file=sys.stderr, flush=True)
        return self._final_code(1)

    def _final_code(self, code: int) -> int:
        """Return the rank's exit code. It is 0 if other replicas may serve, because torchrun ends all ranks if one
        fails."""
        pipeline = self._config.pipeline
        if self._was_ready and pipeline.replicas > 1:
            return 0
        return code
