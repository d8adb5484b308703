"""Stages that die of each request, though they compute a probe, are not replaced without end."""

from __future__ import annotations

from typing import Any

import pytest

from ppserve.core.scheduling.poison_isolation import PROBE
from ppserve.head.engine.member import FatalError
from tests.head.engine.replica_rig import formed


def losses_borne(num_losses: int, *, asks: bool = True, brings_token_at: int | None = None) -> int | None:
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


@pytest.mark.parametrize(
    ("options", "ends_after"), [({}, 64), ({"brings_token_at": 50}, None), ({"asks": False}, None)]
)
def test_only_losses_in_a_row_with_a_request_and_without_a_token_end_the_server(
    options: dict[str, Any], ends_after: int | None
) -> None:
    assert losses_borne(100, **options) == ends_after
