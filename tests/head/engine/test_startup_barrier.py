"""The startup barrier: the Hello of every rank, or none; and the engine receives all messages again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from ppserve import wire
from ppserve.core.architecture import Architecture
from ppserve.head.engine.control import Disconnected, Received
from ppserve.head.engine.startup_barrier import wait_for_hellos
from tests.hellos import hello as hello_of

ARCH = Architecture(4, 64, 4, 128, 300, 300, 256)
GAVE_UP = Received(1, 1, wire.GaveUp("no such file"))

Event = Received | Disconnected


def hello(rank: int, host: str = "here") -> Received:
    return Received(rank, 1, hello_of(rank, 2, ARCH, host))


@dataclass
class ScriptedControl:
    """A control plane on which turns of messages arrive as written here."""

    turns: deque[list[Event]]
    put: list[Event] = field(default_factory=list)
    sent: list[tuple[int, object]] = field(default_factory=list)

    def poll(self, timeout_s: float) -> list[Event]:
        return self.turns.popleft()

    def send(self, rank: int, message: wire.FromHead) -> None:
        self.sent.append((rank, message))

    def put_back(self, heard: Sequence[Event]) -> None:
        self.put = list(heard)


def wait(*turns: list[Event], clock: Callable[[], float] = lambda: 1e-9) -> tuple[list[str], ScriptedControl]:
    """The hellos that were returned, as rank@host. The clock stands still when `hello` arrives."""
    control = ScriptedControl(deque(turns))
    found = wait_for_hellos(control, 2, lambda missing: not control.turns, clock)
    return [f"{each.rank}@{each.host.name}" for each in found], control


@pytest.mark.parametrize(
    ("turns", "returned", "put_back"),
    [
        ([[hello(1)], [], [Received(1, 2, wire.Heartbeat(1, 1))], [hello(0)]], ["0@here", "1@here"], [1, 0]),
        ([[hello(0, "old")], [Disconnected(0, "exit"), hello(1)], [hello(0, "new")]], ["0@new", "1@here"], [1, 0]),
        ([[hello(0)], []], [], [0]),
        ([[hello(0), hello(1), Disconnected(1, "exit")]], [], [0]),
        ([[hello(0), GAVE_UP], [hello(1)]], [], [0, 1]),
    ],
    ids=["all, in order", "one died and came back", "a signal", "one died", "one cannot serve"],
)
def test_hellos_are_returned_when_all_are_there_and_put_back_always(
    turns: list[list[Event]], returned: list[str], put_back: list[int]
) -> None:
    found, control = wait(*turns)
    assert found == returned
    assert [event.rank for event in control.put] == put_back, "and no answers to pings"


def test_ranks_that_wait_are_pinged() -> None:
    times = iter([10.0, 10.1, 10.9, 10.9, 11.0, 11.0])
    _, control = wait([hello(0)], [], [hello(1)], clock=lambda: next(times))
    assert [(rank, type(message)) for rank, message in control.sent] == [(0, wire.Ping)]


def test_the_time_in_which_a_rank_waited_is_not_its_silence() -> None:
    """Otherwise the engine would cut it off where the others took long."""
    times = iter([0.0, 0.1, 0.2, 100.0])
    _, control = wait([hello(0)], [hello(1)], clock=lambda: next(times))
    assert [heard.arrived_ns for heard in control.put if isinstance(heard, Received)] == [100 * 10**9] * 2
