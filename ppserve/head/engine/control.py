"""The engine's interface to the control plane: messages from ranks, messages to them, and how a rank is lost.

`control_sockets` implements it for ranks that are processes, `library.local` for ranks that are threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from ppserve import wire


class LossCause(StrEnum):
    """Why a rank was lost. The values are labels of `ppserve_stage_restarts_total`, and never change."""

    EXIT = "exit"
    """Its connection ended: its process, or the network, did."""
    FROZEN = "frozen"
    """It was silent for too long."""
    STUCK = "stuck"
    """It did not finish a step, or did not leave an epoch, in time."""
    LATE = "late"
    """It did not enter an epoch in time."""
    TIMEOUT = "timeout"
    """It did not read what it was sent."""
    PROTOCOL = "protocol"
    """It sent what no rank may send, or not in this state."""
    RESTART = "restart"
    """The head ended it, so that its keeper starts another."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message from a rank."""

    rank: int
    arrived_ns: int  # on the head's monotonic clock
    message: wire.FromStage


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A rank's connection ended."""

    rank: int
    cause: LossCause


class ControlPlane(Protocol):
    """One connection from each rank to the head, both ways. Its end is an event."""

    def poll(self, timeout_s: float) -> list[Received | Disconnected]:
        """Wait for messages and ends of connections, for at most `timeout_s` or until a `wake`. Return them."""

    def wake(self) -> None:
        """Make a `poll` in progress return. Safe in any thread."""

    def send(self, ranks: Iterable[int], message: wire.FromHead) -> None:
        """Send a message to ranks. If one does not read any more, the next `poll` returns `Disconnected`."""

    def drop(self, rank: int, cause: LossCause) -> None:
        """End a rank's connection: its stage exits, and its keeper starts another."""

    def close(self, goodbye_s: float) -> None:
        """Wait up to `goodbye_s` for ranks that were told to exit; then close all."""
