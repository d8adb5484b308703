"""Other layers per stage: the shape of an epoch, and when one is taken back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pytest

from ppserve import wire
from ppserve.core.architecture import Split, stage_layouts
from ppserve.errors import ConfigError, ReshapeFailed, StagesLost, UsageError
from ppserve.head.engine.member import EpochLost, StageState
from tests.head.engine.scripted import NUM_BLOCKS, MembersRig, loaded_pipeline, started_pipeline


def test_each_rank_loads_its_new_layers_once_it_has_left_the_epoch() -> None:
    pipeline = started_pipeline()
    pipeline.sent.clear()
    assert pipeline.members.reshape(Split((2, 6)), Future(), pipeline.now_ns) == EpochLost()
    assert {m for _, m in pipeline.sent} == {wire.Abandon(1)}
    for stage, halves in ((1, 6), (0, 2)):
        pipeline.sent.clear()
        pipeline.say(stage, wire.Broken(1, "told"))
        assert pipeline.assigned() == {stage: halves}
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
    assert pipeline.assigned() == {0: 4, 1: 4}
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
    assert pipeline.assigned() == {}
    pipeline.members.reshape(Split((2, 4, 2)), Future(), pipeline.now_ns)
    assert pipeline.assigned() == {2: 2}, "the others are in the epoch still"


def test_the_future_of_a_reshape_has_the_epoch_that_has_formed() -> None:
    pipeline = started_pipeline()
    pipeline.sent.clear()
    formed = pipeline.divide(2, 6)
    assert pipeline.assigned() == {0: 2, 1: 6}
    assert not formed.done()
    pipeline.form()
    assert formed.result(0) == 2
    pipeline.lose(1, "exit")
    assert pipeline.members.decision is not None
    assert [each.num_sublayers for each in pipeline.members.decision.layouts] == [2, 6], "it has formed, and stays"


def test_a_rank_that_is_loading_when_the_layers_change_loads_once_more() -> None:
    pipeline = started_pipeline()
    pipeline.sent.clear()
    first = pipeline.divide(6, 2)
    assert pipeline.assigned() == {0: 6, 1: 2}
    second = pipeline.divide(2, 6)
    assert pipeline.assigned() == {}
    with pytest.raises(ReshapeFailed, match="another reshape took its place"):
        first.result(0)
    for expected in ({0: 2, 1: 6}, {}):
        for stage in range(2):
            pipeline.loaded(stage)
        assert pipeline.assigned() == expected
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
    """Keep a rank away for longer than the 60 s that streams wait for a shape."""
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
    formed = pipeline.divide(2, 6)
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
    pipeline.form()
    layouts = [member.layout for member in pipeline.members.all]
    assert [layout and layout.num_sublayers for layout in layouts] == [4, 4]
    assert pipeline.members.num_blocks == NUM_BLOCKS
    assert not [rank for rank, cause in pipeline.dropped if cause != "frozen"]


def test_who_makes_its_cache_has_its_time_to_leave_where_a_shape_is_taken_back() -> None:
    pipeline = started_pipeline()
    pipeline.divide(2, 6)
    has_no_memory_for_its_cache(pipeline)
    assert pipeline.members[0].state is StageState.LEAVING
    pipeline.wait(25, 0, 1)
    assert pipeline.dropped == []
    pipeline.wait(1, 0, 1)
    assert set(pipeline.dropped) == {(0, "stuck")}


def test_the_shape_that_comes_back_is_the_latest_that_had_formed() -> None:
    """It is not the one before, which another reshape has replaced while it loaded."""
    pipeline = started_pipeline()
    pipeline.divide(6, 2)
    pipeline.form()
    had_formed = pipeline.members.decision
    for sublayers in ((2, 6), (5, 3), (3, 5)):
        formed = pipeline.divide(*sublayers)
    pipeline.loaded(0)
    pipeline.say(0, wire.Unable("bad tensor"))
    assert str(formed.exception(0)) == "bad tensor"
    assert pipeline.members.decision is had_formed
    pipeline.form()


def test_a_rank_whose_layers_stay_is_not_told_to_load_anything() -> None:
    pipeline = started_pipeline(3)
    pipeline.sent.clear()
    pipeline.divide(2, 3, 3)
    assert pipeline.assigned() == {1: 3, 2: 3}
    pipeline.say(1, wire.Unable("bad tensor"))
    pipeline.loaded(2)
    assert pipeline.assigned() == {1: 2, 2: 2}
    pipeline.form()


def test_a_shape_that_has_formed_is_not_taken_back() -> None:
    """What hinders its later epochs ends the pipeline, or is tried again, as at any time."""
    pipeline = started_pipeline()
    pipeline.divide(2, 6)
    pipeline.form()
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
    formed = pipeline.divide(2, 6)
    for _ in range(3):
        pipeline.members.restart()
        for rank in range(2):
            pipeline.lose(rank, "restart")
            pipeline.hello(rank)
    pipeline.form()
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
    formed = pipeline.divide(2, 6)
    pipeline.divide(6, 2)
    pipeline.sent.clear()
    pipeline.say(0, wire.Unable("bad tensor"))
    assert pipeline.assigned() == {0: 6}
    pipeline.loaded(1)
    for rank in range(2):
        pipeline.loaded(rank)
    epoch = pipeline.members.epoch
    pipeline.say(0, wire.StoreOpened(epoch, 4000))
    pipeline.say(0, wire.Broken(epoch, "no route"))
    pipeline.say(1, wire.Unable("bad tensor"))
    assert pipeline.members[1].state is StageState.LOADED
    assert formed.exception(0) is not None
    pipeline.form()
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


def test_a_rank_that_dies_meanwhile_comes_back_with_the_new_layers() -> None:
    pipeline = started_pipeline()
    pipeline.members.reshape(Split((6, 2)), Future(), pipeline.now_ns)
    pipeline.lose(1, "exit")
    pipeline.sent.clear()
    pipeline.hello(1)
    assert pipeline.assigned() == {1: 2}


def test_layers_that_cannot_be_divided_so_change_nothing() -> None:
    pipeline = started_pipeline()
    before = pipeline.members.decision
    pipeline.refuses = ConfigError("--layers", "no")
    with pytest.raises(ConfigError, match="--layers: no"):
        pipeline.members.reshape(Split((2, 5)), Future(), pipeline.now_ns)
    assert pipeline.members.formed
    assert pipeline.members.decision is before
