"""While a pipeline starts, the log names what is missing, and the server ends when nothing happens."""

from __future__ import annotations

import io

import pytest

from ppserve import wire
from ppserve.errors import StagesLost
from ppserve.head.starting import TELL_EVERY_S, StartLine, WaitLimit, describe_start, find_missing
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


def test_on_one_host_no_rank_is_said_to_be_missing() -> None:
    _, missing = find_missing([MembersRig(2).members], is_one_host=True)
    assert "stage 1 (rank 1), which imports its libraries" in missing
    assert "MASTER_ADDR" not in missing
    assert "has not come" not in missing


def test_the_line_of_the_start_says_what_the_ranks_do() -> None:
    pipeline = MembersRig(3)
    assert describe_start([pipeline.members]).startswith("3 of 3 import, compile (first start")
    for stage in range(3):
        pipeline.hello(stage)
    assert describe_start([pipeline.members]) == "3 load weights"
    pipeline.loaded(0)
    pipeline.say(1, wire.Loading(1024, 4096))
    assert describe_start([pipeline.members]) == "2 load weights, 1 KiB of 4 KiB; 1 join the pipeline"
    pipeline.say(1, wire.Loading(4096, 4096))
    pipeline.loaded(2)
    assert describe_start([pipeline.members]) == "1 prepare their kernels; 2 join the pipeline"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_moves_on_a_terminal_alone() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        line = StartLine(stream, now_s=1.0)
        line.show("2 load weights", now_s=4.0)
        line.erase()
    assert terminal.getvalue() == "\r\x1b[Kstarting, 3 s: 2 load weights\r\r\x1b[K"
    assert file.getvalue() == ""
