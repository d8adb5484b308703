"""How long the head waits for ranks, and how often it tries again. Times are nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable

PING_EVERY_NS = 500_000_000
HEALTHY_WITHIN_NS = 2_000_000_000
# A silent stage ends the epoch, but keeps its weights for longer.
SILENT_NS = 2_500_000_000
CUT_OFF_NS = 10_000_000_000
# A stage that compiles or reads may be silent for seconds.
SILENT_BEFORE_NS = 30_000_000_000
FORM_WITHIN_NS = 30_000_000_000
# It is long enough for a host that restarts. A deadline still ends streams.
REJOIN_WITHIN_NS = 600_000_000_000
# When a keeper dies, torchrun stops all ranks, so the head drains; and the keeper's rank never returns.
REJOIN_WHILE_DRAINING_NS = 10_000_000_000
# A shape that has not formed has one before it: streams need not wait long for a rank that it lacks.
RESHAPE_WITHIN_NS = 60_000_000_000
# So many deaths and epochs that do not form are the fault of such a shape: too little memory kills, too.
MAX_SETBACKS = 3
# A stage that leaves may have to finish a step, or a wait in gloo that has a timeout.
LEAVE_WITHIN_NS = 25_000_000_000
# One that was only forming has no step; gloo's connect cannot be interrupted, and a restart is faster. But where a
# shape is changed others may make their caches, which takes seconds, and a library's threads cannot be restarted.
LEAVE_FORMING_WITHIN_NS = 2_000_000_000
# So long after a loss the next epoch begins. Each failed attempt doubles it: ten outlast a minute without a link.
SETTLE_NS = 200_000_000
SETTLE_AT_MOST_NS = 20_000_000_000
# After so many failed attempts in a row all processes restart, or the server ends.
RESTART_EVERY = 3
MAX_ATTEMPTS = 10
# If there is more time than this between two ticks, the head itself did not run.
PAUSE_NS = 1_000_000_000
# These are the round trips of 10 s, in which clocks drift by less than 1 ms.
NUM_ROUND_TRIPS = 20


class Silence:
    """How long each rank has been silent. A rank answers a ping at once, so silence means that it does not run."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._heard_ns = dict.fromkeys(ranks, 0)
        self._pinged_ns = self._ticked_ns = 0

    def end(self, rank: int, now_ns: int) -> None:
        """Note that a message of this rank has arrived."""
        self._heard_ns[rank] = now_ns

    def head_paused(self, now_ns: int) -> bool:
        """Return whether the head itself did not run, so that silence says nothing about ranks."""
        return now_ns - self._ticked_ns > PAUSE_NS

    def tick(self, now_ns: int) -> bool:
        """Note that the head runs. Return whether it is to ping all ranks now. After a pause of the head, all
        ranks count as heard."""
        if self.head_paused(now_ns):
            self._heard_ns = dict.fromkeys(self._heard_ns, now_ns)
        self._ticked_ns = now_ns
        if now_ns - self._pinged_ns < PING_EVERY_NS:
            return False
        self._pinged_ns = now_ns
        return True

    def of(self, rank: int, now_ns: int) -> int:
        """Return for how long this rank has been silent."""
        return now_ns - self._heard_ns[rank]


class Attempts:
    """The latest attempts, in a row, to have an epoch that computes a step."""

    def __init__(self) -> None:
        self._num_without_step = 0  # epochs that formed and ended by an error since the last step
        self._count = 0  # so many, or as many as the latest epochs in a row that did not form
        self._settled_ns = 0

    def fail(self, now_ns: int, *, was_forming: bool, is_error: bool, worked: bool) -> bool:
        """Count that an epoch was lost. Return whether it was an attempt that failed.

        was_forming: it had not formed. is_error: a rank has reported an error or never finished a step; deaths are
        counted by keepers. worked: it has computed a step.
        """
        is_without_step = not was_forming and is_error and not worked
        self._num_without_step = 0 if worked else self._num_without_step + (1 if is_without_step else 0)
        self._count = self._count + 1 if was_forming else self._num_without_step
        self._settled_ns = now_ns + min(SETTLE_NS << self._count, SETTLE_AT_MOST_NS)
        return was_forming or is_without_step

    @property
    def are_over(self) -> bool:
        """Whether there may be no further one."""
        return self._count == MAX_ATTEMPTS

    @property
    def need_new_processes(self) -> bool:
        """Whether all stage processes are to be replaced before the next one."""
        return self._count % RESTART_EVERY == 0

    def may_begin(self, now_ns: int) -> bool:
        """Return whether enough time has passed for the next one."""
        return now_ns >= self._settled_ns

    def start_anew(self) -> None:
        """Forget those of another shape."""
        self._num_without_step = self._count = 0
