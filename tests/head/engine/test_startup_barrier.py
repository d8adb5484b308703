"""The startup barrier: all greetings, or none; and what was heard is heard again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ppserve import wire
from ppserve.core.architecture import Architecture
from ppserve.head.engine.control import Disconnected, Received
from ppserve.head.engine.startup_barrier import StartupBarrier

ARCH = Architecture(4, 64, 4, 128, 300, 300, 256)


def hello(rank: int, host: str = "here") -> Received:
    return Received(rank, 1, wire.Hello(rank, 2, host, "/m", ARCH, "float32", None, False, None))


@dataclass
class Door:
    """A control plane on which turns of messages arrive as written here."""

    turns: deque[list[Received | Disconnected]]
    put: list[Received | Disconnected] = field(default_factory=list)
    sent: list[tuple[int, object]] = field(default_factory=list)

    def poll(self, timeout_s: float) -> list[Received | Disconnected]:
        return self.turns.popleft()

    def send(self, rank: int, message: wire.FromHead) -> None:
        self.sent.append((rank, message))

    def put_back(self, heard: Sequence[Received | Disconnected]) -> None:
        self.put = list(heard)


def never() -> bool:
    return False


def lobby_of(*turns: list[Received | Disconnected]) -> tuple[Door, StartupBarrier]:
    """Its clock stands still, and says the moment at which `hello` is heard."""
    door = Door(deque(turns))
    return door, StartupBarrier(door, 2, clock=lambda: 1e-9)


def test_everybodys_greeting_in_order_of_ranks() -> None:
    door, startup_barrier = lobby_of([hello(1)], [], [Received(1, 2, wire.Heartbeat(1, 1))], [hello(0)])
    startup_barrier.wait(lambda: startup_barrier.hellos is not None)
    assert startup_barrier.hellos is not None
    assert [each.rank for each in startup_barrier.hellos] == [0, 1]
    startup_barrier.close()
    assert door.put == [hello(1), hello(0)], "the engine hears the greetings, and no answers to pings"


def test_a_rank_that_died_and_came_back_counts_once() -> None:
    door, startup_barrier = lobby_of([hello(0, "old")], [Disconnected(0, "exit")], [hello(1)], [hello(0, "new")])
    startup_barrier.wait(lambda: startup_barrier.hellos is not None)
    assert startup_barrier.hellos is not None
    assert [each.host for each in startup_barrier.hellos] == ["new", "here"]
    startup_barrier.close()
    assert door.put == [hello(1), hello(0, "new")]


def test_a_rank_that_dies_while_shapes_are_compared_is_not_put_back() -> None:
    door, startup_barrier = lobby_of([hello(0), hello(1)], [], [Disconnected(1, "exit")])
    startup_barrier.wait(lambda: startup_barrier.hellos is not None)
    startup_barrier.wait(lambda: not door.turns)
    startup_barrier.close()
    assert door.put == [hello(0)]


def test_who_waits_is_told_that_the_head_lives() -> None:
    door = Door(deque([[hello(0)], [], [hello(1)]]))
    times = iter([10.0, 10.1, 10.9, 10.9, 11.0])
    startup_barrier = StartupBarrier(door, 2, clock=lambda: next(times))
    startup_barrier.wait(lambda: startup_barrier.hellos is not None)
    assert [(rank, type(message)) for rank, message in door.sent] == [(0, wire.Ping)]


def test_a_rank_that_cannot_serve_ends_the_wait() -> None:
    gave_up = Received(1, 1, wire.GaveUp("no such file"))
    door, startup_barrier = lobby_of([hello(0), gave_up])
    startup_barrier.wait(never)
    assert startup_barrier.hellos is None
    startup_barrier.close()
    assert door.put == [hello(0), gave_up]


def test_a_signal_ends_the_wait() -> None:
    door, startup_barrier = lobby_of([hello(0)], [])
    startup_barrier.wait(lambda: not door.turns)
    assert startup_barrier.hellos is None
    startup_barrier.close()
    assert door.put == [hello(0)]


def test_the_time_that_a_rank_waited_here_is_no_silence() -> None:
    """Else the engine would cut it off where the others took long to come."""
    door, now_s = Door(deque([[hello(0)], [hello(1)]])), [0.0]
    startup_barrier = StartupBarrier(door, 2, clock=lambda: now_s[0])
    startup_barrier.wait(lambda: startup_barrier.hellos is not None)
    now_s[0] = 100.0
    startup_barrier.close()
    assert [heard.arrived_ns for heard in door.put if isinstance(heard, Received)] == [100 * 10**9] * 2
