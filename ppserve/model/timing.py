"""Time stamps of work that is done when the call that asks for it returns."""

from __future__ import annotations

import time

from ppserve.model.backend import Busy


class HostTiming:
    """A `Timing` by the host's clock."""

    def __init__(self) -> None:
        self._begun_ns = self._ended_ns = time.monotonic_ns()

    def computed(self) -> None:
        self._ended_ns = time.monotonic_ns()

    def busy(self) -> Busy:
        return Busy(self._begun_ns, self._ended_ns)
