"""The startup barrier: where ranks wait that have said Hello before it is decided what each of them computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from ppserve import wire
from ppserve.head.engine.control import Disconnected, Received

_TICK_S = 0.1
_PING_EVERY_S = 0.5


class BarrierControl(Protocol):
    """The part of the control plane that the startup barrier needs."""

    def poll(self, timeout_s: float) -> list[Received | Disconnected]: ...

    def send(self, rank: int, message: wire.FromHead) -> None: ...

    def put_back(self, heard: Sequence[Received | Disconnected]) -> None: ...


class StartupBarrier:
    """Who is here. Used by one thread at a time. clock: monotonic, in seconds."""

    def __init__(
        self, control: BarrierControl, world_size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._control, self._world_size, self._clock = control, world_size, clock
        self._greeted: dict[int, tuple[Received, wire.Hello]] = {}
        self._last_words: list[Received] = []
        self._pinged_s = clock()

    @property
    def hellos(self) -> tuple[wire.Hello, ...] | None:
        """The greetings of all ranks, in their order; None while one is missing, or cannot serve."""
        if len(self._greeted) < self._world_size or self._last_words:
            return None
        return tuple(hello for _, (_, hello) in sorted(self._greeted.items()))

    @property
    def missing(self) -> list[int]:
        """The ranks that have not said Hello, or are gone again."""
        return [rank for rank in range(self._world_size) if rank not in self._greeted]

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Hears what ranks say until `is_over`, or until one has said that it cannot serve."""
        while not self._last_words and not is_over():
            if self._clock() - self._pinged_s > _PING_EVERY_S:
                # A stage that hears nothing ends itself.
                self._pinged_s = self._clock()
                for rank in self._greeted:
                    self._control.send(rank, wire.Ping(round(self._pinged_s * 1e9)))
            for event in self._control.poll(_TICK_S):
                if isinstance(event, Disconnected):
                    self._greeted.pop(event.rank, None)
                elif isinstance(event.message, wire.Hello):
                    self._greeted[event.rank] = event, event.message
                elif isinstance(event.message, wire.GaveUp | wire.Failed):
                    self._last_words.append(event)

    def close(self) -> None:
        """What was heard is put back for whoever polls next, as if it arrived now: or else the time that a rank
        has waited here would count as its silence."""
        heard = [*(heard for heard, _ in self._greeted.values()), *self._last_words]
        self._control.put_back([replace(each, arrived_ns=round(self._clock() * 1e9)) for each in heard])
