"""Other layers per stage: the shape of an epoch, when one is taken back, and ranks that none uses."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext

import msgspec
import pytest

from ppserve import wire
from ppserve.core.architecture import Split, stage_layouts
from ppserve.errors import ConfigError, ReshapeFailed, StagesLost, UsageError
from ppserve.head.engine.member import EpochLost, StageState
from tests.head.engine.scripted import NUM_BLOCKS, MembersRig, loaded_pipeline, started_pipeline
from tests.hellos import changed


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


def test_who_makes_its_cache_has_its_time_to_leave_where_a_shape_is_taken_back() -> None:
    pipeline = started_pipeline()
    divide(pipeline, 2, 6)
    has_no_memory_for_its_cache(pipeline)
    assert pipeline.members[0].state is StageState.LEAVING
    wait(pipeline, 25, 0, 1)
    assert pipeline.dropped == []
    wait(pipeline, 1, 0, 1)
    assert set(pipeline.dropped) == {(0, "stuck")}


def test_the_shape_that_comes_back_is_the_latest_that_had_formed() -> None:
    """It is not the one before, which another reshape has replaced while it loaded."""
    pipeline = started_pipeline()
    divide(pipeline, 6, 2)
    form(pipeline)
    had_formed = pipeline.members.decision
    for sublayers in ((2, 6), (5, 3), (3, 5)):
        formed = divide(pipeline, *sublayers)
    pipeline.loaded(0)
    pipeline.say(0, wire.Unable("bad tensor"))
    assert str(formed.exception(0)) == "bad tensor"
    assert pipeline.members.decision is had_formed
    form(pipeline)


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
