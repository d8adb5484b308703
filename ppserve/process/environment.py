"""What torchrun tells a rank in environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ppserve.errors import LauncherError

LAUNCHER_GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""The variable with the seconds from torchrun's SIGTERM to its SIGKILL."""


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """What torchrun tells a rank."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environ(cls) -> RankEnvironment | None:
        """Read the variables. Return None if torchrun did not start this process. Raises LauncherError."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return None
        rank = number_of("RANK")
        world_size = number_of("WORLD_SIZE", least=1)
        if rank >= world_size:
            raise LauncherError(f"RANK: {rank} is not one of {world_size}, from 0 on (WORLD_SIZE)")
        local_rank = number_of("LOCAL_RANK", rank)
        return cls(rank, world_size, local_rank, number_of("LOCAL_WORLD_SIZE", world_size, least=1))


def number_of(variable: str, unset: int = 0, least: int = 0) -> int:
    """Read a variable. unset: its value if it is not set. Raises LauncherError unless it is a number from `least`
    on."""
    value = os.environ.get(variable, str(unset))
    if value.isdecimal() and int(value) >= least:
        return int(value)
    raise LauncherError(f"{variable}: {value!r} is not a whole number from {least} on")
