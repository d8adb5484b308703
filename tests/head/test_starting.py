"""While a pipeline starts, the log names what is missing, and the server ends when nothing happens."""

from __future__ import annotations

import pytest

from ppserve import wire
from ppserve.errors import StagesLost
from ppserve.head.starting import TELL_EVERY_S, WaitLimit, find_missing
from tests.head.engine.scripted import MembersRig


def test_who_is_missing_is_told_every_half_minute(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = MembersRig(2)
    limit = WaitLimit(1000.0, now_s=0.0)
    pipeline.hello(0)
    for second in range(int(3 * TELL_EVERY_S)):
        assert limit.check(*find_missing([pipeline.members]), float(second)) is None
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "stage 1 (rank 1), which has not come" in told[0]
    assert "--secret-file" in told[0]


def test_a_start_without_progress_ends_with_the_reason_and_one_with_progress_does_not() -> None:
    pipeline = MembersRig(2)
    limit = WaitLimit(60.0, now_s=0.0)

    def check(now_s: float) -> StagesLost | None:
        return limit.check(*find_missing([pipeline.members]), now_s)

    assert check(50.0) is None
    for stage in range(2):
        pipeline.hello(stage)
    pipeline.loaded(0)
    for number in range(5):
        pipeline.say(1, wire.Loading(number, 9))
        assert check(100.0 + 50 * number) is None, "it loads, however slowly"
    assert check(355.0) is None
    end = check(361.0)
    assert end is not None
    assert "--start-timeout" in str(end)
    assert "stage 1 (rank 1), which loads its weights, 4 B of 9 B" in str(end)
    assert "stage 0" not in str(end)
