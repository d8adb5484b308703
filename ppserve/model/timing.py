"""How long a step's computation takes: by the host's clock, or by a device's own."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Busy:
    """When a device computed: nanoseconds of the host's monotonic clock."""

    begun_ns: int
    ended_ns: int


class Timing(Protocol):
    """The time that one step's computation takes."""

    def computed(self) -> None:
        """All work of the step has been given to the device."""

    def busy(self) -> Busy:
        """Waits until the device has done that work, and for nothing else that it does."""


class HostTiming:
    """Of work that is done when the call that asks for it returns."""

    def __init__(self) -> None:
        self._begun_ns = self._ended_ns = time.monotonic_ns()

    def computed(self) -> None:
        self._ended_ns = time.monotonic_ns()

    def busy(self) -> Busy:
        return Busy(self._begun_ns, self._ended_ns)
