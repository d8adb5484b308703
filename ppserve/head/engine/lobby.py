"""The lobby: where ranks wait that have said Hello before it is decided what each of them computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ppserve import wire
from ppserve.head.engine.control import Gone, Heard

_TICK_S = 0.1
_PING_EVERY_S = 0.5


class Entrance(Protocol):
    """The part of the control plane that the lobby needs."""

    def poll(self, timeout_s: float) -> list[Heard | Gone]: ...

    def send(self, rank: int, message: wire.FromHead) -> None: ...

    def put_back(self, heard: Sequence[Heard | Gone]) -> None: ...


def gather(
    control: Entrance, world_size: int, is_over: Callable[[], bool], clock: Callable[[], float] = time.monotonic
) -> tuple[wire.Hello, ...] | None:
    """Waits until every rank has said Hello; their greetings, in order of ranks.

    None when `is_over` says so, or when a rank cannot serve. Either way the messages are put back, for whoever
    polls next: to them it is as if nobody had waited here.
    """
    greeted: dict[int, Heard] = {}
    hellos: dict[int, wire.Hello] = {}
    last_words: list[Heard | Gone] = []
    pinged_s = clock()
    while len(hellos) < world_size and not last_words and not is_over():
        if clock() - pinged_s > _PING_EVERY_S:
            # A stage that hears nothing ends itself.
            pinged_s = clock()
            for rank in hellos:
                control.send(rank, wire.Ping(round(pinged_s * 1e9)))
        for event in control.poll(_TICK_S):
            if isinstance(event, Gone):
                del greeted[event.rank], hellos[event.rank]
            elif isinstance(event.message, wire.Hello):
                greeted[event.rank], hellos[event.rank] = event, event.message
            elif isinstance(event.message, wire.GaveUp | wire.Failed):
                last_words.append(event)
    control.put_back([*greeted.values(), *last_words])
    is_complete = len(hellos) == world_size and not last_words
    return tuple(hellos[rank] for rank in sorted(hellos)) if is_complete else None
