"""How long the head waits for whom: pauses, silence, epochs that do not form, clocks of other hosts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ppserve import wire
from ppserve.core.plan import StepResult, StepStamps
from ppserve.head.engine.member import EpochLost, FatalError, Formed, MemberEvent, StageState
from tests.head.engine.members_rig import SECOND, MembersRig, answer, loaded_pipeline, result

Fail = Callable[[MembersRig, int], list[MemberEvent]]


@pytest.mark.parametrize(("formed", "patience_s"), [(True, 25), (False, 2)])
def test_a_survivor_that_cannot_leave_is_replaced(formed: bool, patience_s: int) -> None:
    pipeline = loaded_pipeline(3)
    if formed:
        pipeline.join()
    else:
        pipeline.say(0, wire.StoreOpened(1, 4001))
    pipeline.lose(2, "exit")
    pipeline.say(0, wire.Broken(1, "told"))
    for _ in range(2 * patience_s):
        pipeline.tick(0.5)
        pipeline.say(0, wire.Heartbeat(pipeline.now_ns, pipeline.now_ns))
        pipeline.say(1, wire.Heartbeat(pipeline.now_ns, pipeline.now_ns))
        assert pipeline.dropped == []
    pipeline.tick(0.5)
    assert pipeline.dropped == [(1, "stuck")]


def test_a_pause_of_the_head_is_nobodys_fault() -> None:
    pipeline = MembersRig(2)
    pipeline.start()
    assert pipeline.tick(5) == []
    assert pipeline.members.formed
    for _ in range(22):
        pipeline.tick(0.5)
    assert {stage for stage, _ in pipeline.dropped} == {0, 1}, "those who then stay silent are dropped"


@pytest.mark.parametrize("silent_s", [3, 9])
def test_a_pause_of_a_stage_costs_an_epoch_and_no_loading(silent_s: int) -> None:
    pipeline = MembersRig(2)
    pipeline.start()
    events: list[MemberEvent] = []
    for _ in range(2 * silent_s):
        answer(pipeline, 0)
        events += pipeline.tick(0.5)
    assert events == [EpochLost(1, "stage 1: silent", None)]
    assert pipeline.dropped == []
    pipeline.sent.clear()
    for stage in range(2):
        assert pipeline.say(stage, wire.Broken(1, "told")) == []
    pipeline.tick(0.5)
    assert pipeline.join() == [Formed(2, 10)]
    assert [member.restarts for member in pipeline.members.all] == [0, 0]


def test_a_silent_stage_is_noticed_within_three_seconds_and_cut_off_after_ten() -> None:
    pipeline = MembersRig(2)
    pipeline.start()
    began_ns, lost_ns = pipeline.now_ns, 0
    while not pipeline.dropped:
        answer(pipeline, 0)
        if pipeline.tick(0.1):
            lost_ns = lost_ns or pipeline.now_ns
            pipeline.say(0, wire.Broken(1, "told"))
        assert pipeline.forms() == {}, "no epoch forms with a stage that is silent"
    assert 2 * SECOND < lost_ns - began_ns <= 3 * SECOND
    assert 10 * SECOND < pipeline.now_ns - began_ns < 11 * SECOND
    assert [stage for stage, _ in pipeline.dropped] == [1]
    assert not pipeline.members.is_healthy(pipeline.now_ns)


def fail_to_form(pipeline: MembersRig, by: int) -> list[MemberEvent]:
    """An epoch that one stage's transport keeps from forming; both leave it."""
    pipeline.tick(21)
    epoch = pipeline.members.epoch
    pipeline.say(0, wire.StoreOpened(epoch, 4000))
    events = pipeline.say(by, wire.Broken(epoch, "no route to host"))
    return events + pipeline.say(1 - by, wire.Broken(epoch, "told"))


def fail_at_first_step(pipeline: MembersRig, by: int) -> list[MemberEvent]:
    """An epoch that forms, computes the first stage's part of a step, and fails."""
    if pipeline.members.first.state is StageState.LOADED:
        pipeline.sent.clear()
        pipeline.tick(21)
    pipeline.join()
    epoch = pipeline.members.epoch
    pipeline.say(0, result(epoch))
    events = pipeline.say(by, wire.Broken(epoch, "step 7 failed"))
    return events + pipeline.say(1 - by, wire.Broken(epoch, "told"))


def replace_dropped(pipeline: MembersRig) -> None:
    for stage, cause in pipeline.dropped:
        pipeline.lose(stage, cause)
        pipeline.hello(stage)
    for stage, _ in pipeline.dropped:
        pipeline.loaded(stage)
    pipeline.dropped.clear()


@pytest.mark.parametrize("fail", [fail_to_form, fail_at_first_step])
def test_each_third_failed_epoch_replaces_all_processes_and_the_tenth_ends_the_server(fail: Fail) -> None:
    pipeline = loaded_pipeline()
    for attempt in range(1, 10):
        assert not any(isinstance(event, FatalError) for event in fail(pipeline, attempt % 2)), attempt
        assert pipeline.dropped == ([(0, "restart"), (1, "restart")] if attempt % 3 == 0 else [])
        replace_dropped(pipeline)
    cause = "no route to host" if fail is fail_to_form else "step 7 failed"
    reason = f"the pipeline did not compute a step in 10 attempts; the last one: {cause}"
    assert FatalError(reason, usage=False) in fail(pipeline, 1)


def test_an_epoch_that_computes_a_step_ends_the_count() -> None:
    pipeline = loaded_pipeline()
    for _ in range(5):
        for _ in range(2):
            assert fail_to_form(pipeline, 1) == []
        pipeline.sent.clear()
        pipeline.tick(1)
        epoch = pipeline.members.epoch
        assert pipeline.join() == [Formed(epoch, 10)]
        pipeline.say(1, wire.Result(StepResult(epoch, 1, 1, StepStamps(*range(6)))))
        for stage in range(2):
            pipeline.say(stage, wire.Broken(epoch, "reset"))
    assert pipeline.dropped == []


def test_an_idle_server_may_lose_its_stages_as_often_as_it_likes() -> None:
    """Deaths are no attempts: keepers count them. What it took to form the last epoch is forgotten."""
    pipeline = loaded_pipeline()
    for _ in range(20):
        assert fail_to_form(pipeline, 0) == []
        pipeline.sent.clear()
        pipeline.tick(21)
        assert pipeline.join() == [Formed(pipeline.members.epoch, 10)]
        for _ in range(3):
            assert not any(isinstance(event, FatalError) for event in pipeline.lose(1, "exit"))
            pipeline.hello(1)
        pipeline.leave(0)
        pipeline.loaded(1)
    assert pipeline.dropped == []


def with_a_stage_elsewhere() -> MembersRig:
    pipeline = MembersRig(2)
    pipeline.hello(0)
    pipeline.hello(1, machine="there")
    for stage in range(2):
        pipeline.loaded(stage)
    pipeline.join()
    return pipeline


def test_clocks_of_other_hosts_are_aligned_by_the_quickest_round_trip() -> None:
    pipeline = with_a_stage_elsewhere()
    ahead_ns = 5_000_000_000
    for rtt_ns in (4_000_000, 200_000, 9_000_000):
        sent_ns = pipeline.now_ns
        pipeline.now_ns += rtt_ns
        pipeline.say(1, wire.Heartbeat(sent_ns, sent_ns + rtt_ns // 2 + ahead_ns + rtt_ns // 50))
    stamps = StepStamps(*[ahead_ns + t for t in range(6)])
    (done,) = pipeline.say(1, wire.Result(StepResult(1, 1, 1, stamps)))
    assert isinstance(done, StepResult)
    assert abs(done.stamps.planned) <= 4_000, "off by at most the quickest trip's asymmetry"


def test_old_round_trips_are_forgotten_so_that_a_drifting_clock_stays_aligned() -> None:
    pipeline = with_a_stage_elsewhere()
    for minute in range(10):
        for _ in range(120):
            pipeline.now_ns += SECOND // 2
            drift_ns = 50 * pipeline.now_ns // 1_000_000  # 50 ppm
            # The best round trips of all are those of the first minute.
            rtt_ns = 100_000 if minute == 0 else 300_000
            sent_ns = pipeline.now_ns - rtt_ns
            pipeline.say(1, wire.Heartbeat(sent_ns, sent_ns + rtt_ns // 2 + drift_ns))
        assert abs(pipeline.members[1].clock_offset_ns - drift_ns) < 1_000_000
