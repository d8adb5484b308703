"""Ranks that the shape of the present epoch does not use: they end nothing, and may be used again."""

from __future__ import annotations

from contextlib import nullcontext

import msgspec
import pytest

from ppserve import wire
from ppserve.errors import ConfigError, StagesLost
from tests.head.engine.scripted import MembersRig, started_pipeline
from tests.hellos import changed


def with_an_unused_rank() -> MembersRig:
    """Three ranks, of which the last one is not used."""
    pipeline = started_pipeline(3)
    pipeline.divide(4, 4)
    pipeline.form()
    assert pipeline.members.ranks_in_use == (0, 1)
    pipeline.sent.clear()
    return pipeline


def test_an_unused_rank_that_was_away_for_long_has_time_to_come_back_once_it_is_used() -> None:
    pipeline = with_an_unused_rank()
    pipeline.lose(2, "exit")
    pipeline.wait(700, 0, 1)
    formed = pipeline.divide(2, 2, 4)
    pipeline.wait(59, 0, 1)
    pipeline.hello(2)
    pipeline.form()
    assert formed.result(0) == pipeline.members.epoch
    pipeline.lose(2, "exit")
    pipeline.leave(0, 1)
    pipeline.wait(600, 0, 1)
    with pytest.raises(StagesLost, match="stage 2 did not come back in time"):
        pipeline.wait(1, 0, 1)


def test_after_a_shape_is_taken_back_its_ranks_have_their_time_anew() -> None:
    """One of them was away while no shape used it."""
    pipeline = started_pipeline(3)
    formed = pipeline.divide(4, 4)
    pipeline.lose(2, "exit")
    pipeline.wait(700, 0, 1)
    pipeline.say(0, wire.Unable("bad tensor"))
    assert formed.exception(0) is not None
    pipeline.wait(600, 0, 1)
    pipeline.hello(2)
    pipeline.form()


@pytest.mark.parametrize("kind", ["failed", "other world", "other weights", "silent"])
def test_an_unused_rank_ends_nothing_and_a_shape_that_needs_it_is_refused(kind: str) -> None:
    pipeline = with_an_unused_rank()
    hello = pipeline.members[2].hello
    assert hello is not None
    reason = "stage 2 died 10 times in a row"
    if kind == "silent":
        pipeline.wait(31, 0, 1)
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
    pipeline.wait(1, 0, 1, 2)
    assert pipeline.members.formed
    if kind != "silent":
        for sublayers in ((2, 2, 4), (4, 2, 2)):
            with pytest.raises(ConfigError, match=f"--layers: stage 2 cannot be used: {reason}"):
                pipeline.divide(*sublayers)
        assert pipeline.members.formed, "it was refused, so nothing has ended"
        pipeline.divide(2, 6)  # it does without
        pipeline.form()
        pipeline.lose(2, "exit")
    pipeline.hello(2)
    pipeline.sent.clear()
    pipeline.divide(2, 2, 4)
    assert 2 in pipeline.assigned(), "one that came back right can be used"
    pipeline.form()


def test_a_rank_that_is_gone_ends_the_pipeline_where_the_shape_before_needs_it_too() -> None:
    for before, after, ends in (((4, 4), (2, 2, 4), False), ((2, 2, 4), (4, 2, 2), True)):
        pipeline = started_pipeline(3)
        pipeline.divide(*before)
        pipeline.form()
        formed = pipeline.divide(*after)
        pipeline.lose(2, "exit")
        with pytest.raises(StagesLost, match="it died") if ends else nullcontext():
            pipeline.say(2, wire.Failed("it died"))
        assert str(formed.exception(0)) == "it died"
        if not ends:
            pipeline.sent.clear()
            pipeline.form()


def test_a_shape_before_that_needs_a_rank_which_has_failed_meanwhile_cannot_be_had_either() -> None:
    pipeline = started_pipeline(3)
    formed = pipeline.divide(4, 4)
    pipeline.lose(2, "exit")
    assert pipeline.say(2, wire.Failed("it died")) is None
    with pytest.raises(StagesLost, match="stage 2 cannot be used: it died"):
        pipeline.say(0, wire.Unable("bad tensor"))
    assert str(formed.exception(0)) == "bad tensor"


def test_a_thread_that_has_failed_and_is_not_used_is_given_up_once() -> None:
    """Its connection does not end: it is the library's."""
    pipeline = with_an_unused_rank()
    pipeline.say(2, wire.Failed("it died"))
    pipeline.wait(700, 0, 1)
    assert pipeline.dropped == []
    assert pipeline.members.formed
