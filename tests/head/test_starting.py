"""While a pipeline starts, the log names who is missing, and the server ends when nothing happens for too long."""

from __future__ import annotations

import pytest

from ppserve import wire
from ppserve.head.starting import TELL_EVERY_S, StartWatch, missing_ranks
from tests.head.engine.members_rig import MembersRig


def test_who_is_missing_is_told_every_half_minute(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = MembersRig(2)
    watch = StartWatch([pipeline.members], 1000.0, now_s=0.0)
    pipeline.hello(0)
    for second in range(int(3 * TELL_EVERY_S)):
        assert watch.check(float(second)) is None
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "stage 1 (rank 1), which has not come" in told[0]
    assert "--secret-file" in told[0]


def test_a_start_without_progress_ends_with_the_reason_and_one_with_progress_does_not() -> None:
    pipeline = MembersRig(2)
    watch = StartWatch([pipeline.members], 60.0, now_s=0.0)
    assert watch.check(50.0) is None
    for stage in range(2):
        pipeline.hello(stage)
    pipeline.loaded(0)
    for number in range(5):
        pipeline.say(1, wire.Loading(number, 9))
        assert watch.check(100.0 + 50 * number) is None, "it loads, however slowly"
    assert watch.check(355.0) is None
    end = watch.check(361.0)
    assert end is not None
    assert not end.usage
    assert "--start-timeout" in end.reason
    assert "stage 1 (rank 1), which loads its weights, 4 B of 9 B" in end.reason
    assert "stage 0" not in end.reason


def test_ranks_that_have_not_measured_are_named() -> None:
    assert "rank 0, rank 1, which has not come" in missing_ranks([0, 1])
    assert "--parallel auto" in missing_ranks([0, 1])
