"""The epochs: when one forms, when it is lost, what a rank may send when, and how long the head waits for whom."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest

from ppserve import wire
from ppserve.core.plan import RankResult, StepStamps
from ppserve.errors import ConfigError, StagesLost, UsageError
from ppserve.head.engine.member import EpochLost, StageState
from tests.architectures import gpt2 as gpt2_architecture
from tests.head.engine.scripted import NUM_BLOCKS, SECOND, MembersRig, loaded_pipeline, result, started_pipeline
from tests.hellos import changed

Fail = Callable[[MembersRig, int], None]
OTHER = gpt2_architecture(6, 64, 4, 128, 300, 300, 256)


def test_a_lost_stage_begins_a_new_epoch_when_it_is_back() -> None:
    pipeline = started_pipeline(3)
    assert pipeline.lose(1, "exit") == EpochLost()
    assert not pipeline.members.formed
    assert pipeline.say(0, result(1)) is None, "a result of a lost epoch counts for nothing"
    pipeline.leave(0, 2)
    pipeline.tick(1)
    assert pipeline.forms() == {}, "the epoch must not form without stage 1"
    pipeline.load(1)
    for late in (wire.Ready(1), wire.Broken(1, "old"), wire.StoreOpened(1, 1)):
        assert pipeline.say(0, late) is None, "what is said of an old epoch is ignored"
    pipeline.join()
    assert pipeline.members.epoch == 2
    assert [m.restarts for m in pipeline.members.all] == [0, 1, 0]
    assert isinstance(pipeline.say(0, result(2)), RankResult)


def test_tensor_ranks_load_the_same_stage_and_the_epoch_has_all_of_them(caplog: pytest.LogCaptureFixture) -> None:
    """Four ranks of the second of two replicas, two for each of two stages."""
    rig = MembersRig(2, num_tensor=2, num_replicas=2)
    members, ranks = rig.members, (2, 3, 6, 7)
    assert members.ranks == ranks
    assert [(member.stage, member.tensor) for member in members.all] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for rank in ranks:
        rig.hello(rank)
    layouts = {rank: message.layout for rank, message in rig.sent if isinstance(message, wire.Assign)}
    assert [layouts[rank].place for rank in ranks] == [0, 1, 2, 3]
    assert layouts[7] == replace(layouts[6], tensor=1)
    assert (layouts[6].stage, layouts[6].num_tensor, layouts[6].num_places) == (1, 2, 4)
    for rank in ranks:
        rig.loaded(rank)
    assert list(rig.forms()) == [2]
    rig.say(2, wire.StoreOpened(1, 1))
    assert list(rig.forms()) == [3, 6, 7]
    assert [rig.say(rank, wire.Ready(1)) for rank in ranks] == [None, None, None, wire.Ready(1)]
    assert members.num_blocks == NUM_BLOCKS + 2
    assert members.handle_disconnect(7, "exit", rig.now_ns) == EpochLost()
    assert "replica 1 stage 1 tensor 1: exit" in caplog.text
    left = {rank for rank, message in rig.sent if isinstance(message, wire.Abandon)}
    assert left == {2, 3, 6}, "the others keep their weights"


# ---- what a rank may say ----


def test_a_message_at_the_wrong_time_ends_the_connection_and_changes_nothing() -> None:
    pipeline = MembersRig(2)
    assert pipeline.loaded(0) is None, "it has not even greeted"
    assert pipeline.dropped == [(0, "protocol")]
    assert pipeline.members[0].state is StageState.ABSENT
    assert pipeline.members[0].loaded is None
    pipeline.load(0, 1)
    pipeline.say(0, wire.StoreOpened(1, 4001))
    assert pipeline.loaded(1) is None, "weights that are loaded twice"
    assert pipeline.dropped[1:] == [(1, "protocol")]
    assert pipeline.members[1].state is StageState.FORMING, "else it would wait for ever, and the others for it"
    for stage in range(2):
        pipeline.say(stage, wire.Ready(1))
    assert pipeline.hello(1) is None, "a second Hello on the same connection"
    assert pipeline.dropped[2:] == [(1, "protocol")]
    assert pipeline.members.formed, "the epoch is lost when the connection is gone, not before"
    assert pipeline.lose(1, "protocol") == EpochLost()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gpu": 0}, "stage 1 came back with a GPU instead of a CPU"),
        ({"quantization": "int8"}, "stage 1 came back with quantization int8 instead of none"),
        ({"name": "elsewhere"}, "stage 1 came back with another machine, elsewhere instead of host"),
        ({"architecture": OTHER}, "stage 1 came back with another model in /m"),
        ({"weights": "trained on", "checkpoint": "/n"}, "stage 1 came back with other weights in /n"),
        ({"machine": "started anew"}, None),
        ({}, None),
    ],
)
def test_a_stage_that_comes_back_different_is_refused(changes: dict[str, object], named: str | None) -> None:
    pipeline = started_pipeline()
    before = pipeline.members[1].hello
    assert before is not None
    pipeline.lose(1, "exit")
    with nullcontext() if named is None else pytest.raises(UsageError, match=f"^{named}$"):
        pipeline.say(1, changed(before, **changes))


def test_the_number_of_blocks_stays_when_a_stage_comes_back_with_other_memory() -> None:
    """Block tables of open requests name blocks up to it."""
    pipeline = started_pipeline()
    assert pipeline.members.num_blocks == NUM_BLOCKS
    for num_blocks in (NUM_BLOCKS // 2, NUM_BLOCKS * 2):
        pipeline.lose(1, "exit")
        pipeline.leave(0)
        pipeline.hello(1)
        pipeline.loaded(1, num_blocks=num_blocks)
        pipeline.tick(1)
        epoch = pipeline.members.epoch
        assert {form.num_blocks for form in pipeline.forms().values()} == {NUM_BLOCKS}
        pipeline.say(0, wire.StoreOpened(epoch, 1))
        for stage in range(2):
            pipeline.say(stage, wire.Ready(epoch))
        pipeline.sent.clear()


def test_a_process_that_ends_before_the_first_epoch_is_no_restart() -> None:
    pipeline = MembersRig(2)
    pipeline.hello(0)
    assert pipeline.lose(0, "exit") is None
    assert pipeline.members[0].restarts == 0
    pipeline.load(0, 1)
    pipeline.join()
    assert pipeline.members.epoch == 1


def test_mistakes_before_the_first_epoch_are_the_operators() -> None:
    pipeline = MembersRig(1, mistake=ConfigError("--layers", "no"))
    with pytest.raises(ConfigError, match="--layers: no"):
        pipeline.hello(0)
    with pytest.raises(UsageError, match="bad file"):
        pipeline.say(0, wire.Failed("bad file"))


# ---- how long the head waits ----


@pytest.mark.parametrize(("formed", "patience_s"), [(True, 25), (False, 2)])
def test_a_survivor_that_cannot_leave_is_replaced(formed: bool, patience_s: int) -> None:
    pipeline = started_pipeline(3) if formed else loaded_pipeline(3)
    pipeline.say(0, wire.StoreOpened(1, 4001))
    pipeline.lose(2, "exit")
    pipeline.say(0, wire.Broken(1, "told"))
    for _ in range(2 * patience_s):
        pipeline.tick(0.5)
        pipeline.answer(0, 1)
        assert pipeline.dropped == []
    pipeline.tick(0.5)
    assert pipeline.dropped == [(1, "stuck")]


@pytest.mark.parametrize(("draining", "patience_s"), [(False, 600), (True, 10)])
def test_before_the_first_epoch_an_absent_stage_has_all_the_time_that_the_start_has(
    draining: bool, patience_s: int
) -> None:
    """It may download for long, or be restarted by its keeper; `--start-timeout` is what limits that."""
    pipeline = MembersRig(2)
    if draining:
        pipeline.members.start_draining()
    pipeline.hello(1)
    for second in range(0, 3600, 5):
        assert pipeline.tick(5) is None, second
        pipeline.answer(1)
    assert pipeline.dropped == []
    pipeline.hello(0)
    for stage in range(2):
        pipeline.loaded(stage)
    pipeline.join()
    pipeline.lose(0, "exit")
    for _ in range(patience_s):
        pipeline.tick(1)
        pipeline.answer(1)
    with pytest.raises(StagesLost, match="stage 0 did not come back in time"):
        pipeline.tick(1)


def test_a_pause_of_the_head_is_nobodys_fault() -> None:
    pipeline = started_pipeline()
    assert not pipeline.members.is_healthy(pipeline.now_ns + 5 * SECOND), "for others, while its thread hangs"
    assert pipeline.tick(5) is None
    assert pipeline.members.is_healthy(pipeline.now_ns)
    for _ in range(22):
        pipeline.tick(0.5)
    assert {stage for stage, _ in pipeline.dropped} == {0, 1}, "those who then stay silent are dropped"


@pytest.mark.parametrize("silent_s", [3, 9])
def test_a_pause_of_a_stage_costs_an_epoch_and_no_loading(silent_s: int) -> None:
    pipeline = started_pipeline()
    events = []
    for _ in range(2 * silent_s):
        pipeline.answer(0)
        events.append(pipeline.tick(0.5))
    assert [event for event in events if event is not None] == [EpochLost()]
    assert pipeline.dropped == []
    pipeline.sent.clear()
    for stage in range(2):
        assert pipeline.say(stage, wire.Broken(1, "told")) is None
    pipeline.tick(0.5)
    pipeline.join()
    assert pipeline.members.epoch == 2
    assert [member.restarts for member in pipeline.members.all] == [0, 0]


@pytest.mark.parametrize("state", [StageState.LOADING, StageState.LOADED, StageState.FORMING])
def test_a_stage_that_loads_compiles_or_connects_may_be_silent_for_thirty_seconds(state: StageState) -> None:
    pipeline = MembersRig(2)
    pipeline.hello(0)
    pipeline.hello(1)
    if state is not StageState.LOADING:
        pipeline.loaded(1)
    if state is StageState.FORMING:
        pipeline.loaded(0)
        pipeline.say(0, wire.StoreOpened(1, 4001))
    began_ns = pipeline.now_ns
    assert pipeline.members[1].state is state
    while not pipeline.dropped:
        pipeline.answer(0)
        pipeline.tick(0.5)
    assert 30 * SECOND < pipeline.now_ns - began_ns <= 31 * SECOND
    assert (1, "frozen") in pipeline.dropped


def test_a_silent_stage_is_noticed_within_three_seconds_and_cut_off_after_ten() -> None:
    pipeline = started_pipeline()
    began_ns, lost_ns = pipeline.now_ns, 0
    while not pipeline.dropped:
        pipeline.answer(0)
        if pipeline.tick(0.1):
            lost_ns = lost_ns or pipeline.now_ns
            pipeline.say(0, wire.Broken(1, "told"))
        assert pipeline.members.is_healthy(pipeline.now_ns) == (pipeline.now_ns - began_ns < 2 * SECOND)
        assert pipeline.forms() == {}, "no epoch forms with a stage that is silent"
    assert 2 * SECOND < lost_ns - began_ns <= 3 * SECOND
    assert 10 * SECOND < pipeline.now_ns - began_ns < 11 * SECOND
    assert [stage for stage, _ in pipeline.dropped] == [1]


def fail_to_form(pipeline: MembersRig, by: int) -> None:
    """An epoch that one stage's transport keeps from forming; both leave it."""
    pipeline.tick(21)
    epoch = pipeline.members.epoch
    pipeline.say(0, wire.StoreOpened(epoch, 4000))
    assert pipeline.say(by, wire.Broken(epoch, "no route to host")) is None
    pipeline.say(1 - by, wire.Broken(epoch, "told"))


@pytest.mark.parametrize("formed", [True, False])
def test_each_failed_attempt_doubles_the_time_to_the_next_up_to_twenty_seconds(formed: bool) -> None:
    """An epoch that has worked is followed by another at once."""
    pipeline, waited_s = loaded_pipeline(), []
    for attempt in range(9):
        if formed and attempt == 0:
            pipeline.join()
            pipeline.say(1, result(1, place=1))
        epoch = pipeline.members.epoch
        for stage in range(2):
            pipeline.say(0, wire.StoreOpened(epoch, 4000))
            pipeline.say(stage, wire.Broken(epoch, "no route to host"))
        pipeline.sent.clear()
        replace_dropped(pipeline)
        lost_ns = pipeline.now_ns
        while not pipeline.forms():
            pipeline.answer(0, 1)
            pipeline.tick(0.1)
        waited_s.append((pipeline.now_ns - lost_ns) / SECOND)
    first = 0 if formed else 1
    assert waited_s == pytest.approx([min(20, 0.2 * 2**attempt) for attempt in range(first, first + 9)])


def fail_at_first_step(pipeline: MembersRig, by: int) -> None:
    """An epoch that forms, computes the first stage's part of a step, and fails."""
    if pipeline.members.first.state is StageState.LOADED:
        pipeline.sent.clear()
        pipeline.tick(21)
    pipeline.join()
    epoch = pipeline.members.epoch
    pipeline.say(0, result(epoch))
    pipeline.say(by, wire.Broken(epoch, "step 7 failed"))
    pipeline.say(1 - by, wire.Broken(epoch, "told"))


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
        fail(pipeline, attempt % 2)
        assert pipeline.dropped == ([(0, "restart"), (1, "restart")] if attempt % 3 == 0 else [])
        replace_dropped(pipeline)
    cause = "no route to host" if fail is fail_to_form else "step 7 failed"
    with pytest.raises(StagesLost, match=f"did not compute a step in 10 attempts; the last one: {cause}"):
        fail(pipeline, 1)


def test_an_epoch_that_computes_a_step_ends_the_count() -> None:
    pipeline = loaded_pipeline()
    for _ in range(5):
        for _ in range(2):
            fail_to_form(pipeline, 1)
        pipeline.sent.clear()
        pipeline.tick(1)
        pipeline.join()
        epoch = pipeline.members.epoch
        pipeline.say(1, result(epoch, place=1))
        for stage in range(2):
            pipeline.say(stage, wire.Broken(epoch, "reset"))
    assert pipeline.dropped == []


def test_an_idle_server_may_lose_its_stages_as_often_as_it_likes() -> None:
    """Deaths are no attempts: keepers count them. What it took to form the last epoch is forgotten."""
    pipeline = loaded_pipeline()
    for _ in range(20):
        fail_to_form(pipeline, 0)
        pipeline.sent.clear()
        pipeline.tick(21)
        pipeline.join()
        for _ in range(3):
            pipeline.lose(1, "exit")
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
    done = pipeline.say(1, wire.Result(RankResult(epoch=1, step_id=1, place=1, stamps=stamps)))
    assert isinstance(done, RankResult)
    assert abs(done.stamps.planned) <= 4_000, "off by at most the quickest trip's asymmetry"


def test_a_process_that_comes_back_has_a_clock_of_its_own() -> None:
    """Its host may have started anew. So round trips of the process before it count no more, however quick."""
    pipeline = with_a_stage_elsewhere()

    def beat(ahead_ns: int, rtt_ns: int) -> None:
        pipeline.now_ns += rtt_ns
        sent_ns = pipeline.now_ns - rtt_ns
        pipeline.say(1, wire.Heartbeat(sent_ns, sent_ns + rtt_ns // 2 + ahead_ns))

    beat(5 * SECOND, rtt_ns=100_000)
    assert pipeline.members[1].clock_offset_ns == 5 * SECOND
    pipeline.lose(1, "exit")
    pipeline.hello(1, machine="there")
    assert pipeline.members[1].clock_offset_ns == 0, "nothing is known of it yet"
    beat(-3 * SECOND, rtt_ns=9_000_000)
    assert pipeline.members[1].clock_offset_ns == -3 * SECOND


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
