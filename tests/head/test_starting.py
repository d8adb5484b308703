"""The log names what is missing while a pipeline starts, and the server ends when nothing happens."""

from __future__ import annotations

import pytest

from ppserve import wire
from ppserve.errors import StagesLost
from ppserve.head.starting import TELL_EVERY_S, WaitLimit, describe_start, find_missing
from tests.head.engine.scripted import ARCH, MembersRig
from tests.hellos import hello


def test_who_is_missing_is_told_every_half_minute(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = MembersRig(2)
    limit = WaitLimit(1000.0, now_s=0.0)
    pipeline.hello(0)
    for second in range(int(3 * TELL_EVERY_S)):
        assert limit.check(*find_missing([pipeline.members], num_here=1), float(second)) is None
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "stage 1 (rank 1), which has not come" in told[0]
    assert "--secret-file" in told[0]


def test_a_start_without_progress_ends_with_the_reason_and_one_with_progress_does_not() -> None:
    pipeline = MembersRig(2)
    limit = WaitLimit(60.0, now_s=0.0)

    def check(now_s: float) -> StagesLost | None:
        return limit.check(*find_missing([pipeline.members], num_here=1), now_s)

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


def test_while_something_happens_nobody_is_said_to_be_missing(caplog: pytest.LogCaptureFixture) -> None:
    limit = WaitLimit(1000.0, now_s=0.0)
    _, missing = find_missing([MembersRig(2).members], num_here=2)
    for second in range(300):
        limit.check(f"compiling kernels, {second // 20} of 15", missing, float(second))
    assert not caplog.records


def test_on_several_hosts_the_line_says_who_is_not_here_yet() -> None:
    pipeline = MembersRig(3)
    assert describe_start([pipeline.members], "importing", 1) == "1 of 3 importing; 2 of 3 not here yet"
    _, missing = find_missing([pipeline.members], num_here=1)
    here, second, third = missing.split("; ")
    assert "stage 0 (rank 0), which imports" in here
    assert "MASTER_ADDR" not in here
    assert all("has not come: is it started, with the same MASTER_ADDR" in away for away in (second, third))
    for stage in range(2):
        pipeline.hello(stage)
    assert describe_start([pipeline.members], "importing", 1) == "1 of 3 not here yet; 2 of 3 loading"


def test_on_one_host_no_rank_is_said_to_be_missing() -> None:
    _, missing = find_missing([MembersRig(2).members], num_here=2)
    assert "stage 1 (rank 1), which imports its libraries" in missing
    assert "MASTER_ADDR" not in missing
    assert "has not come" not in missing


def test_the_line_of_the_start_says_what_the_ranks_do() -> None:
    pipeline = MembersRig(3)

    def said(doing: str = "compiling kernels, 2 of 8", records_graphs: bool = False) -> str:
        return describe_start([pipeline.members], doing, 3, records_graphs)

    assert said() == "compiling kernels, 2 of 8"
    pipeline.hello(0)
    assert said() == "2 of 3 preparing; 1 of 3 loading", "what rank 0 did before says nothing of the others"
    for stage in (1, 2):
        pipeline.hello(stage)
    assert said() == "loading"
    pipeline.loaded(0)
    pipeline.say(1, wire.Loading(1024, 4096))
    assert said() == "2 of 3 loading 1 KiB of 4 KiB; 1 of 3 joining"
    assert said(records_graphs=True).endswith("1 of 3 joining"), "there is no GPU"
    pipeline.say(1, wire.Loading(4096, 4096))
    pipeline.loaded(2)
    assert said() == "1 of 3 testing kernels; 2 of 3 joining"
    pipeline.loaded(1)
    assert said() == "joining"


def test_ranks_with_a_gpu_record_graphs_when_they_join() -> None:
    pipeline = MembersRig(1)
    pipeline.say(0, hello(0, 1, ARCH, device=wire.StageDevice(0)))
    pipeline.loaded(0)
    assert describe_start([pipeline.members], "", 1, records_graphs=True) == "joining, recording graphs"
    assert describe_start([pipeline.members], "", 1, records_graphs=False) == "joining"
