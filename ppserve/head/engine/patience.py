"""How long the head waits for ranks, and how often it tries again. Times are nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable

PING_EVERY_NS = 500_000_000
HEALTHY_WITHIN_NS = 2_000_000_000
# A stage that is silent for so long ends the epoch. Its process, which has the weights, is kept until CUT_OFF_NS.
SILENT_NS = 2_500_000_000
CUT_OFF_NS = 10_000_000_000
# A stage that compiles or reads may be silent for seconds.
SILENT_BEFORE_NS = 30_000_000_000
FORM_WITHIN_NS = 30_000_000_000
# A lost rank may stay away for so long: a host may restart meanwhile. Deadlines of requests still end streams.
REJOIN_WITHIN_NS = 600_000_000_000
# When a keeper dies, torchrun stops all ranks, so the head drains; and the keeper's rank never returns.
REJOIN_WHILE_DRAINING_NS = 10_000_000_000
# A shape that has not formed is given up for the one before it if a rank stays away for so long.
RESHAPE_WITHIN_NS = 60_000_000_000
# After so many deaths and failed epochs, such a shape is given up: it may need more memory than there is.
MAX_SETBACKS = 3
# A stage that leaves may have to finish a step, or a wait in gloo that has a timeout.
LEAVE_WITHIN_NS = 25_000_000_000
# One that was only forming has no step; gloo's connect cannot be interrupted, and a restart is faster. But where a
# shape is changed others may make their caches, which takes seconds, and a library's threads cannot be restarted.
LEAVE_FORMING_WITHIN_NS = 2_000_000_000
# The next epoch begins so long after a loss. Each failed attempt doubles the pause, up to SETTLE_AT_MOST_NS: ten
# attempts last longer than a network that is cut for a minute.
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
    """The latest failed attempts, in a row, to form an epoch that computes a step."""

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
        """Whether the server gives up: there have been MAX_ATTEMPTS failed attempts."""
        return self._count == MAX_ATTEMPTS

    @property
    def need_new_processes(self) -> bool:
        """Whether all stage processes are to be replaced before the next attempt."""
        return self._count % RESTART_EVERY == 0

    def may_begin(self, now_ns: int) -> bool:
        """Return whether enough time has passed for the next attempt."""
        return now_ns >= self._settled_ns

    def start_anew(self) -> None:
        """Forget all attempts, because the pipeline gets another shape."""
        self._num_without_step = self._count = 0
