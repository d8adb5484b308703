"""The last minutes of the server: from readings to points."""

from __future__ import annotations

from typing import Any

import pytest

from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.causes import BUSY, CAUSES, HOST
from ppserve.head.observe.history import MAX_POINTS, History, Moment, Point
from ppserve.head.observe.metrics import Metrics

SECOND = 1_000_000_000
NO_TTFT: dict[str, list[float]] = {"bounds_s": [0.1, 0.3], "counts": [0, 0, 0]}
NOTHING: dict[str, Any] = {"generated_tokens": 0, "waiting": 0, "ttft": NO_TTFT}


def times(busy_s: float, host_s: float, idle_s: float) -> StageTimes:
    busy, bubble = dict.fromkeys(BUSY, 0), dict.fromkeys(CAUSES, 0)
    busy[BUSY[0]], bubble[HOST] = round(busy_s * SECOND), round(host_s * SECOND)
    return StageTimes(busy, bubble, round(idle_s * SECOND))


def test_a_point_is_what_happened_between_two_readings() -> None:
    history = History()
    before = NOTHING | {"generated_tokens": 100, "ttft": NO_TTFT | {"counts": [5, 5, 5]}}
    after = NOTHING | {"generated_tokens": 150, "waiting": 3, "ttft": NO_TTFT | {"counts": [5, 7, 7]}}
    history.add(Moment(7 * SECOND, before, (times(1, 1, 1), times(2, 0, 0))))
    assert history.points() == []
    history.add(Moment(9 * SECOND, after, (times(1.5, 1.5, 2), times(4, 0, 0))))
    # Both of the first tokens took from 0.1 to 0.3 s. Of 3 s with work, 0.5 were bubbles.
    (point,) = history.points()
    assert point == Point(9.0, 25.0, pytest.approx(0.2), 3, pytest.approx(1 / 6, abs=1e-4))


def test_a_second_without_work_has_no_bubbles_and_none_without_requests_a_time_to_the_first_token() -> None:
    history = History()
    for second in range(2):
        history.add(Moment(second * SECOND, NOTHING, (times(0, 0, second),)))
    assert history.points() == [Point(1.0, 0.0, None, 0, None)]


def test_the_latest_points_are_kept_and_are_made_of_the_server_s_own_load() -> None:
    history, load = History(), Metrics(1).read_load()
    for second in range(3 * MAX_POINTS):
        history.add(Moment(second * SECOND, load, (times(second, 0, 0),)))
    points = history.points()
    assert [point.at_s for point in points] == [*range(2 * MAX_POINTS, 3 * MAX_POINTS)]
    assert {point.bubbles for point in points} == {0.0}
