"""The order of the queue: priority with ageing, then tokens served to the caller, then arrival."""

from __future__ import annotations

import pytest

from ppserve.core.request import Request, StopConditions
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.fair_queue import MAX_IDLE_CALLERS, FairQueue
from ppserve.core.scheduling.sequence import SequenceGroup


def entry(
    key: str, caller: str = "", priority: int = 0, num_tokens: int = 10, submitted_s: float = 0.0
) -> SequenceGroup:
    request = Request(key, (1,), StopConditions(num_tokens - 1), caller=caller, priority=priority)
    return SequenceGroup(request, 0, SchedulerConfig(1), submitted_s)


def served_order(queue: FairQueue, count: int, now: float = 0.0) -> list[str]:
    """Admits `count` requests, and charges the tokens of each at once."""
    order = []
    for _ in range(count):
        group = queue.first(now)
        assert group is not None
        queue.remove(group)
        queue.charge(group.request.caller, group.num_tokens)
        order.append(group.key)
    return order


def test_requests_of_one_caller_go_by_priority_then_in_order_of_arrival() -> None:
    queue = FairQueue()
    for key, priority in (("low", -1), ("first", 0), ("high", 5), ("second", 0)):
        queue.push(entry(key, priority=priority))
    assert served_order(queue, 4) == ["high", "first", "second", "low"]
    assert queue.first(0.0) is None


def flooded(num_requests: int = 100) -> FairQueue:
    """Return a queue with requests of one caller, "flood"."""
    queue = FairQueue()
    for i in range(num_requests):
        queue.push(entry(f"flood{i}", "flood"))
    return queue


@pytest.mark.parametrize("now", [0.0, 500.0])
def test_many_requests_of_one_caller_do_not_delay_another(now: float) -> None:
    """The oldest of many has waited for those before it, not for the one who comes now and has nothing."""
    queue = flooded()
    assert served_order(queue, 10) == [f"flood{i}" for i in range(10)]
    queue.push(entry("light", "light", submitted_s=now))
    # The new caller's counter starts at the other's, not at zero: at most one more request goes before it.
    assert "light" in served_order(queue, 2, now)


def test_two_busy_callers_share_by_tokens_not_by_requests() -> None:
    queue = FairQueue()
    for i in range(100):
        queue.push(entry(f"big{i}", "big", num_tokens=30))
        queue.push(entry(f"small{i}", "small", num_tokens=10))
    order = served_order(queue, 40)
    num_small = sum(key.startswith("small") for key in order)
    assert num_small == 30


def test_being_idle_earns_no_advantage() -> None:
    queue = flooded(50)
    served_order(queue, 40)
    for i in range(50):
        queue.push(entry(f"fresh{i}", "fresh"))
    order = served_order(queue, 10)
    assert 4 <= sum(key.startswith("fresh") for key in order) <= 6


def test_a_heavy_caller_is_not_punished_for_having_been_alone() -> None:
    queue = FairQueue()
    queue.push(entry("h", "heavy"))
    queue.charge("heavy", 1_000_000)
    served_order(queue, 1)
    queue.end_request("heavy")
    for i in range(10):
        queue.push(entry(f"new{i}", "new"))
        queue.push(entry(f"heavy{i}", "heavy"))
    assert sum(key.startswith("heavy") for key in served_order(queue, 10)) >= 4


def test_a_caller_that_was_idle_for_a_moment_has_been_served_what_it_was() -> None:
    queue = FairQueue()
    for caller in ("light", "heavy"):
        queue.push(entry(caller, caller))
    queue.charge("heavy", 40)
    queue.remove(entry("heavy", "heavy"))
    queue.end_request("heavy")
    for i in range(5):
        queue.push(entry(f"heavy{i}", "heavy"))
        queue.push(entry(f"light{i}", "light"))
    assert served_order(queue, 4) == ["light", "light0", "light1", "light2"]


def test_a_class_rises_in_steps_of_ten_seconds_and_equals_are_ordered_by_what_was_served() -> None:
    queue = FairQueue()
    queue.push(entry("old", "light", submitted_s=0.0))
    queue.push(entry("high", "heavy", priority=1, submitted_s=9.0))
    queue.charge("heavy", 1000)
    for now, key in ((9.9, "high"), (15.0, "old"), (19.1, "high"), (20.0, "old")):
        first = queue.first(now)
        assert first is not None
        assert first.key == key, now


def test_waiting_makes_up_for_low_priority() -> None:
    queue = FairQueue()
    queue.push(entry("old", priority=0, submitted_s=0.0))
    served = []
    for i in range(100):
        now = float(i)
        queue.push(entry(f"high{i}", priority=2, submitted_s=now))
        served += served_order(queue, 1, now)
    assert "old" in served
    assert 20 <= served.index("old") <= 31


def test_who_waits_behind_others_of_its_class_does_not_raise_those() -> None:
    """A heavy caller's old request is behind light ones that have just come; they are not as urgent."""
    queue = FairQueue()
    queue.push(entry("heavy0", "heavy"))
    queue.push(entry("light0", "light"))
    served_order(queue, 2)
    queue.charge("heavy", 20_000)
    queue.push(entry("heavy1", "heavy"))
    queue.push(entry("light1", "light", submitted_s=60.0))
    queue.push(entry("urgent", "urgent", priority=5, submitted_s=60.0))
    assert served_order(queue, 1, now=60.0) == ["urgent"]


def test_before_a_caller_s_next_request_go_as_many_of_every_other() -> None:
    queue = FairQueue()
    for i in range(5):
        for caller in "ab":
            queue.push(entry(f"{caller}{i}", caller, num_tokens=7))
        queue.push(entry(f"urgent{i}", "a", priority=1, num_tokens=3))
    queue.push(entry("new0", "new", num_tokens=2))
    for caller, tokens_ahead in (("a", 5 * 17 + 2), ("new", 5 * 3 + 4 * 7 + 2), ("newer", 5 * 3 + 2 * 7 + 2)):
        assert queue.tokens_ahead(entry("next", caller).request) == tokens_ahead


def test_idle_callers_are_forgotten() -> None:
    queue = FairQueue()
    for i in range(3 * MAX_IDLE_CALLERS):
        queue.push(entry("r", f"caller{i}"))
        served_order(queue, 1)
        queue.end_request(f"caller{i}")
    assert len(queue._accounts) == MAX_IDLE_CALLERS
    assert "caller0" not in queue._accounts
