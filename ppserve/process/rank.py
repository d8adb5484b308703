"""A torchrun rank other than 0: its signals, and the keeper of its stage."""

from __future__ import annotations

import signal

from ppserve.config import ServeConfig
from ppserve.process.environment import RankEnvironment, die_with_launcher
from ppserve.process.keeper import Keeper
from ppserve.process.meeting import find_meeting


def run_rank(config: ServeConfig, environment: RankEnvironment) -> int:
    """The whole life of the rank; returns its exit code. Raises UsageError."""
    die_with_launcher()
    keeper = Keeper(config, environment.rank, environment.world_size, find_meeting(config, environment))
    grace_s = config.server.shutdown_timeout_s + 2.0

    def on_signal(_signum: int, _frame: object) -> None:
        # The head decides when stages stop: running streams may finish first.
        keeper.stop(grace_s)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    return keeper.run()
