"""How long the head waits for ranks, and how often it tries again. Times are nanoseconds."""

from __future__ import annotations

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
