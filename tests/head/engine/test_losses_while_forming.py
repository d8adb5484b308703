"""Stages that die of each request, though they compute a probe, are not replaced for ever."""

from __future__ import annotations

from ppserve.core.scheduling.poison_isolation import PROBE
from ppserve.head.engine.member import FatalError
from tests.head.engine.replica_rig import formed


def hopeless_after(num_losses: int, *, asks: bool = True, brings_token_at: int | None = None) -> int | None:
    """How many losses the server bears while each request kills the last stage. asks: there is always one."""
    rig = formed()
    for number in range(num_losses):
        if asks:
            rig.submit("a" * (number + 1))
        for plan in rig.refill():
            if plan.slices == (PROBE,):
                rig.compute(plan)
                (plan,) = rig.refill()[:1]
            if number == brings_token_at:
                rig.compute(plan)
        if any(isinstance(event, FatalError) for event in rig.lose(3)):
            return number + 1
        rig.greet(3)
        rig.wait(1)
        rig.join()
    return None


def test_stages_that_die_of_each_request_end_the_server_in_the_end() -> None:
    assert hopeless_after(100) == 64


def test_a_token_of_any_request_begins_the_count_anew() -> None:
    assert hopeless_after(100, brings_token_at=50) is None


def test_losses_without_a_request_are_not_counted() -> None:
    assert hopeless_after(100, asks=False) is None
