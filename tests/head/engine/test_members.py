"""The epochs: when one forms, when it is lost, what a rank may send when, and how long the head waits for whom."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace

import msgspec
import pytest

from ppserve import wire
from ppserve.core.architecture import Split, stage_layouts
from ppserve.core.plan import RankResult, StepStamps
from ppserve.errors import ConfigError, ReshapeFailed, StagesLost, UsageError
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
    assert pipeline.hello(1) is None, "a second greeting on the same connection"
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
            pipeline.say(1, wire.Result(RankResult(epoch=1, step_id=1, place=1, stamps=StepStamps(*range(6)))))
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
        pipeline.say(1, wire.Result(RankResult(epoch=epoch, step_id=1, place=1, stamps=StepStamps(*range(6)))))
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


# ---- other layers per stage -----------------------------------------------------------------------------------


def assigned(pipeline: MembersRig) -> dict[int, int]:
    """How many halves of layers each rank was told to load, since the last call."""
    found = {rank: m.layout.num_sublayers for rank, m in pipeline.sent if isinstance(m, wire.Assign)}
    pipeline.sent.clear()
    return found


def test_each_rank_loads_its_new_layers_once_it_has_left_the_epoch() -> None:
    pipeline = started_pipeline()
    pipeline.sent.clear()
    assert pipeline.members.reshape(Split((2, 6)), Future(), pipeline.now_ns) == EpochLost()
    assert {m for _, m in pipeline.sent} == {wire.Abandon(1)}
    for stage, halves in ((1, 6), (0, 2)):
        pipeline.sent.clear()
        pipeline.say(stage, wire.Broken(1, "told"))
        assert assigned(pipeline) == {stage: halves}
        assert pipeline.members[stage].state is StageState.LOADING
    pipeline.loaded(0)
    assert pipeline.forms() == {}, "stage 1 still loads"
    pipeline.loaded(1)
    forms = pipeline.forms()
    assert [(stage, form.layout.num_sublayers, form.epoch) for stage, form in forms.items()] == [(0, 2, 2)]
    pipeline.say(0, wire.StoreOpened(2, 1))
    assert pipeline.forms()[1].layout == stage_layouts(Split((2, 6)))[1]


def test_with_fewer_stages_the_last_rank_waits_and_its_loss_is_none() -> None:
    pipeline = started_pipeline(3)
    pipeline.members.reshape(Split((4, 4)), Future(), pipeline.now_ns)
    pipeline.sent.clear()
    for stage in range(3):
        pipeline.say(stage, wire.Broken(1, "told"))
    assert assigned(pipeline) == {0: 4, 1: 4}
    for stage in range(2):
        pipeline.loaded(stage)
    pipeline.say(0, wire.StoreOpened(2, 1))
    pipeline.say(0, wire.Ready(2))
    assert pipeline.say(1, wire.Ready(2)) == wire.Ready(2), "all that are used are ready"
    assert pipeline.lose(2, "exit") is None
    pipeline.tick(1000)
    pipeline.answer(0, 1)
    assert pipeline.members.is_healthy(pipeline.now_ns)
    pipeline.hello(2)
    assert assigned(pipeline) == {}
    pipeline.members.reshape(Split((2, 4, 2)), Future(), pipeline.now_ns)
    assert assigned(pipeline) == {2: 2}, "the others are in the epoch still"


def divide(pipeline: MembersRig, *sublayers: int) -> Future[int]:
    """Divide the layers anew; all ranks that are there leave the epoch."""
    formed: Future[int] = Future()
    epoch = pipeline.members.epoch
    pipeline.members.reshape(Split(sublayers), formed, pipeline.now_ns)
    for member in pipeline.members.all:
        if member.state is StageState.LEAVING:
            pipeline.say(member.rank, wire.Broken(epoch, "told"))
    return formed


def form(pipeline: MembersRig) -> None:
    """All ranks in use load what they were told to, and join the epoch."""
    pipeline.sent.clear()
    while loading := [m for m in pipeline.members.in_use if m.state is StageState.LOADING]:
        for member in loading:
            pipeline.loaded(member.rank)
    for _ in range(100):
        if pipeline.members.first.state is StageState.FORMING:
            break
        pipeline.sent.clear()
        pipeline.answer(*pipeline.ranks)
        pipeline.tick(0.5)
    pipeline.join()


def test_the_future_of_a_reshape_has_the_epoch_that_has_formed() -> None:
    pipeline = started_pipeline()
    pipeline.sent.clear()
    formed = divide(pipeline, 2, 6)
    assert assigned(pipeline) == {0: 2, 1: 6}
    assert not formed.done()
    form(pipeline)
    assert formed.result(0) == 2
    pipeline.lose(1, "exit")
    assert pipeline.members.decision is not None
    assert [each.num_sublayers for each in pipeline.members.decision.layouts] == [2, 6], "it has formed, and stays"


def test_a_rank_that_is_loading_when_the_layers_change_loads_once_more() -> None:
    pipeline = started_pipeline()
    pipeline.sent.clear()
    first = divide(pipeline, 6, 2)
    assert assigned(pipeline) == {0: 6, 1: 2}
    second = divide(pipeline, 2, 6)
    assert assigned(pipeline) == {}
    with pytest.raises(ReshapeFailed, match="another reshape took its place"):
        first.result(0)
    for expected in ({0: 2, 1: 6}, {}):
        for stage in range(2):
            pipeline.loaded(stage)
        assert assigned(pipeline) == expected
    assert pipeline.members.first.state is StageState.FORMING
    assert not second.done()


Hinder = Callable[[MembersRig], None]


def cannot_load(pipeline: MembersRig) -> None:
    pipeline.loaded(0)
    pipeline.say(1, wire.Unable("bad tensor"))


def cannot_load_first(pipeline: MembersRig) -> None:
    """The other rank still loads: it must do so twice."""
    pipeline.say(1, wire.Unable("bad tensor"))


def has_no_room(pipeline: MembersRig) -> None:
    pipeline.loaded(1, num_blocks=31)  # 128 tokens in blocks of 4 need 32
    pipeline.loaded(0)


def has_no_memory_for_its_cache(pipeline: MembersRig) -> None:
    for rank in range(2):
        pipeline.loaded(rank)
    pipeline.say(0, wire.StoreOpened(pipeline.members.epoch, 4000))
    pipeline.say(1, wire.Unable("bad tensor"))


def dies_three_times(pipeline: MembersRig) -> None:
    """Twice while it loads; then the epoch does not form."""
    for _ in range(2):
        pipeline.lose(1, "exit")
        assert pipeline.members.decision is not None
        assert pipeline.members.decision.layouts[1].num_sublayers == 6
        pipeline.hello(1)
    for rank in range(2):
        pipeline.loaded(rank)
    pipeline.say(0, wire.StoreOpened(pipeline.members.epoch, 4000))
    assert pipeline.say(1, wire.Broken(pipeline.members.epoch, "no route")) is None


def does_not_come_back(pipeline: MembersRig) -> None:
    """For longer than the 60 s that streams wait for a shape."""
    pipeline.loaded(0)
    pipeline.lose(1, "exit")
    for _ in range(120):
        pipeline.answer(0)
        pipeline.tick(0.5)
        assert pipeline.members.decision is not None
        assert pipeline.members.decision.layouts[1].num_sublayers == 6
    pipeline.tick(0.5)
    pipeline.hello(1)


@pytest.mark.parametrize(
    ("hinder", "reason"),
    [
        (cannot_load, "bad tensor"),
        (cannot_load_first, "bad tensor"),
        (has_no_room, "--kv-cache-memory: stage 1 has 310 bytes for keys and values, room for 124 tokens"),
        (has_no_memory_for_its_cache, "bad tensor"),
        (dies_three_times, "no route, as the last of 3 setbacks"),
        (does_not_come_back, "stage 1 did not come back in time"),
    ],
)
def test_a_shape_that_cannot_be_had_is_taken_back(hinder: Hinder, reason: str) -> None:
    pipeline = started_pipeline()
    before = pipeline.members.decision
    formed = divide(pipeline, 2, 6)
    hinder(pipeline)
    with pytest.raises(ReshapeFailed, match=reason):
        formed.result(0)
    assert pipeline.members.decision is before
    assert pipeline.members.num_blocks == NUM_BLOCKS, "as before: block tables fit"
    for member in pipeline.members.all:
        if member.state is StageState.LEAVING:
            pipeline.say(member.rank, wire.Broken(pipeline.members.epoch, "told"))
        assert pipeline.members[member.rank].state is StageState.LOADING
    pipeline.loaded(0)
    form(pipeline)
    layouts = [member.layout for member in pipeline.members.all]
    assert [layout and layout.num_sublayers for layout in layouts] == [4, 4]
    assert pipeline.members.num_blocks == NUM_BLOCKS
    assert not [rank for rank, cause in pipeline.dropped if cause != "frozen"]


def test_a_rank_whose_layers_stay_is_not_told_to_load_anything() -> None:
    pipeline = started_pipeline(3)
    pipeline.sent.clear()
    divide(pipeline, 2, 3, 3)
    assert assigned(pipeline) == {1: 3, 2: 3}
    pipeline.say(1, wire.Unable("bad tensor"))
    pipeline.loaded(2)
    assert assigned(pipeline) == {1: 2, 2: 2}
    form(pipeline)


def test_a_shape_that_has_formed_is_not_taken_back() -> None:
    """What hinders its later epochs ends the pipeline, or is tried again, as at any time."""
    pipeline = started_pipeline()
    divide(pipeline, 2, 6)
    form(pipeline)
    for _ in range(3):
        pipeline.lose(1, "exit")
        pipeline.hello(1)
    pipeline.leave(0)
    pipeline.loaded(1)
    pipeline.tick(1)
    epoch = pipeline.members.epoch
    pipeline.say(0, wire.StoreOpened(epoch, 4000))
    assert pipeline.say(1, wire.Unable("out of memory")) is None
    assert pipeline.dropped == [(1, "restart")], "another process may have the memory"
    pipeline.lose(1, "restart")
    pipeline.hello(1)
    with pytest.raises(StagesLost, match="bad tensor"):
        pipeline.say(1, wire.Unable("bad tensor"))


def test_restarts_are_no_setbacks() -> None:
    pipeline = started_pipeline()
    formed = divide(pipeline, 2, 6)
    for _ in range(3):
        pipeline.members.restart()
        for rank in range(2):
            pipeline.lose(rank, "restart")
            pipeline.hello(rank)
    form(pipeline)
    assert formed.result(0) == 2


def test_memory_or_weights_that_lack_at_the_start_are_final() -> None:
    pipeline = MembersRig(2)
    for stage in range(2):
        pipeline.hello(stage)
    with pytest.raises(UsageError, match="bad tensor"):
        pipeline.say(0, wire.Unable("bad tensor"))
    pipeline = loaded_pipeline()
    with pytest.raises(StagesLost, match="out of memory"):
        pipeline.say(0, wire.Unable("out of memory"))


def test_a_rank_that_leaves_or_loads_what_is_not_wanted_any_more_need_not_be_able() -> None:
    pipeline = started_pipeline()
    formed = divide(pipeline, 2, 6)
    divide(pipeline, 6, 2)
    pipeline.sent.clear()
    pipeline.say(0, wire.Unable("bad tensor"))
    assert assigned(pipeline) == {0: 6}
    pipeline.loaded(1)
    for rank in range(2):
        pipeline.loaded(rank)
    epoch = pipeline.members.epoch
    pipeline.say(0, wire.StoreOpened(epoch, 4000))
    pipeline.say(0, wire.Broken(epoch, "no route"))
    pipeline.say(1, wire.Unable("bad tensor"))
    assert pipeline.members[1].state is StageState.LOADED
    assert formed.exception(0) is not None
    form(pipeline)
    assert pipeline.dropped == []


@pytest.mark.parametrize("state", [StageState.ABSENT, StageState.LOADED, StageState.READY])
def test_who_was_asked_for_nothing_cannot_be_unable(state: StageState) -> None:
    pipeline = started_pipeline()
    if state is StageState.LOADED:
        pipeline.lose(1, "exit")
        pipeline.leave(0)
    if state is StageState.ABSENT:
        pipeline.lose(0, "exit")
    assert pipeline.members[0].state is state
    assert pipeline.say(0, wire.Unable("bad tensor")) is None
    assert pipeline.dropped == [(0, "protocol")]
    assert pipeline.members[0].state is state


# ---- ranks that no shape uses ---------------------------------------------------------------------------------


def with_an_unused_rank() -> MembersRig:
    """Three ranks, of which the last one is not used."""
    pipeline = started_pipeline(3)
    divide(pipeline, 4, 4)
    form(pipeline)
    assert pipeline.members.ranks_in_use == (0, 1)
    pipeline.sent.clear()
    return pipeline


def wait(pipeline: MembersRig, seconds: int, *answering: int) -> None:
    for _ in range(2 * seconds):
        pipeline.answer(*answering)
        pipeline.tick(0.5)


def test_an_unused_rank_that_was_away_for_long_has_time_to_come_back_once_it_is_used() -> None:
    pipeline = with_an_unused_rank()
    pipeline.lose(2, "exit")
    wait(pipeline, 700, 0, 1)
    formed = divide(pipeline, 2, 2, 4)
    wait(pipeline, 59, 0, 1)
    pipeline.hello(2)
    form(pipeline)
    assert formed.result(0) == pipeline.members.epoch
    pipeline.lose(2, "exit")
    pipeline.leave(0, 1)
    wait(pipeline, 600, 0, 1)
    with pytest.raises(StagesLost, match="stage 2 did not come back in time"):
        wait(pipeline, 1, 0, 1)


def test_after_a_shape_is_taken_back_its_ranks_have_their_time_anew() -> None:
    """Also the one that was away while no shape used it."""
    pipeline = started_pipeline(3)
    formed = divide(pipeline, 4, 4)
    pipeline.lose(2, "exit")
    wait(pipeline, 700, 0, 1)
    pipeline.say(0, wire.Unable("bad tensor"))
    assert formed.exception(0) is not None
    wait(pipeline, 600, 0, 1)
    pipeline.hello(2)
    form(pipeline)


@pytest.mark.parametrize("kind", ["failed", "other world", "other weights", "silent"])
def test_an_unused_rank_ends_nothing_and_a_shape_that_needs_it_is_refused(kind: str) -> None:
    pipeline = with_an_unused_rank()
    hello = pipeline.members[2].hello
    assert hello is not None
    reason = "stage 2 died 10 times in a row"
    if kind == "silent":
        wait(pipeline, 31, 0, 1)
        assert set(pipeline.dropped) == {(2, "frozen")}
    pipeline.lose(2, "exit")
    if kind == "failed":
        assert pipeline.say(2, wire.Failed(reason)) is None
    elif kind == "other world":
        reason = "stage 2 belongs to 7 ranks"
        assert pipeline.say(2, msgspec.structs.replace(hello, world_size=7)) is None
    elif kind == "other weights":
        reason = "stage 2 came back with other weights"
        assert pipeline.say(2, changed(hello, weights="trained on")) is None
    wait(pipeline, 1, 0, 1, 2)
    assert pipeline.members.formed
    if kind != "silent":
        for sublayers in ((2, 2, 4), (4, 2, 2)):
            with pytest.raises(ConfigError, match=f"--layers: stage 2 cannot be used: {reason}"):
                divide(pipeline, *sublayers)
        assert pipeline.members.formed, "it was refused, so nothing has ended"
        divide(pipeline, 2, 6)  # it does without
        form(pipeline)
        pipeline.lose(2, "exit")
    pipeline.hello(2)
    pipeline.sent.clear()
    divide(pipeline, 2, 2, 4)
    assert 2 in assigned(pipeline), "one that came back right can be used"
    form(pipeline)


def test_a_rank_that_is_gone_ends_the_pipeline_where_the_shape_before_needs_it_too() -> None:
    for before, after, ends in (((4, 4), (2, 2, 4), False), ((2, 2, 4), (4, 2, 2), True)):
        pipeline = started_pipeline(3)
        divide(pipeline, *before)
        form(pipeline)
        formed = divide(pipeline, *after)
        pipeline.lose(2, "exit")
        with pytest.raises(StagesLost, match="it died") if ends else nullcontext():
            pipeline.say(2, wire.Failed("it died"))
        assert str(formed.exception(0)) == "it died"
        if not ends:
            pipeline.sent.clear()
            form(pipeline)


def test_a_shape_before_that_needs_a_rank_which_has_failed_meanwhile_cannot_be_had_either() -> None:
    pipeline = started_pipeline(3)
    formed = divide(pipeline, 4, 4)
    pipeline.lose(2, "exit")
    assert pipeline.say(2, wire.Failed("it died")) is None
    with pytest.raises(StagesLost, match="stage 2 cannot be used: it died"):
        pipeline.say(0, wire.Unable("bad tensor"))
    assert str(formed.exception(0)) == "bad tensor"


def test_a_thread_that_has_failed_and_is_not_used_is_given_up_once() -> None:
    """Its connection does not end: it is the library's."""
    pipeline = with_an_unused_rank()
    pipeline.say(2, wire.Failed("it died"))
    wait(pipeline, 700, 0, 1)
    assert pipeline.dropped == []
    assert pipeline.members.formed


def test_a_rank_that_dies_meanwhile_comes_back_with_the_new_layers() -> None:
    pipeline = started_pipeline()
    pipeline.members.reshape(Split((6, 2)), Future(), pipeline.now_ns)
    pipeline.lose(1, "exit")
    pipeline.sent.clear()
    pipeline.hello(1)
    assert assigned(pipeline) == {1: 2}


def test_layers_that_cannot_be_divided_so_change_nothing() -> None:
    pipeline = started_pipeline()
    before = pipeline.members.decision
    pipeline.refuses = ConfigError("--layers", "no")
    with pytest.raises(ConfigError, match="--layers: no"):
        pipeline.members.reshape(Split((2, 5)), Future(), pipeline.now_ns)
    assert pipeline.members.formed
    assert pipeline.members.decision is before
