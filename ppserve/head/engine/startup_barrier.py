"""The startup barrier: waits for the Hello of every rank before it is decided what each rank computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ppserve import wire
from ppserve.head.engine.control import Disconnected, Received, SocketControlPlane

_POLL_S = 0.1
_PING_EVERY_S = 0.5


def wait_for_hellos(
    control: SocketControlPlane,
    world_size: int,
    is_over: Callable[[list[int]], bool],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[wire.Hello, ...]:
    """The Hello of every rank, in the order of ranks. Empty where a rank cannot serve, or `is_over` came first.

    is_over: asked several times a second, with the ranks that are missing. clock: monotonic, in seconds. All
    messages are put back for the engine as if they arrived at the end of this wait: otherwise the wait would count
    as a rank's silence.
    """
    hellos: dict[int, Received] = {}
    failures: list[Received] = []
    pinged_s = clock()
    while not failures:
        missing = [rank for rank in range(world_size) if rank not in hellos]
        if not missing or is_over(missing):
            break
        if clock() - pinged_s > _PING_EVERY_S:
            # A stage that receives nothing ends itself.
            pinged_s = clock()
            for rank in hellos:
                control.send(rank, wire.Ping(round(pinged_s * 1e9)))
        for event in control.poll(_POLL_S):
            match event:
                case Disconnected(rank):
                    hellos.pop(rank, None)
                case Received(rank, _, wire.Hello()):
                    hellos[rank] = event
                case Received(_, _, wire.GaveUp() | wire.Failed()):
                    failures.append(event)
    now_ns = round(clock() * 1e9)
    control.put_back([replace(each, arrived_ns=now_ns) for each in (*hellos.values(), *failures)])
    found = [hellos[rank].message for rank in sorted(hellos)]
    complete = len(hellos) == world_size and not failures
    return tuple(each for each in found if isinstance(each, wire.Hello)) if complete else ()
