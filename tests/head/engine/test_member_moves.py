"""The states of a rank: which messages it may send when, and what it must be when it comes back."""

from __future__ import annotations

import pytest

from ppserve import wire
from ppserve.core.architecture import Architecture
from ppserve.errors import ConfigError
from ppserve.head.engine.member import EpochLost, FatalError, InvalidMove, Member, StageState
from tests.head.engine.members_rig import MembersRig, loaded_pipeline, result
from tests.hellos import changed

OTHER = Architecture(6, 64, 4, 128, 300, 300, 256)

MOVES = {
    ("ABSENT", "ABSENT"), ("ABSENT", "LOADING"),
    ("LOADING", "ABSENT"), ("LOADING", "LOADED"),
    ("LOADED", "ABSENT"), ("LOADED", "FORMING"),
    ("FORMING", "ABSENT"), ("FORMING", "READY"), ("FORMING", "LEAVING"), ("FORMING", "LOADED"),
    ("READY", "ABSENT"), ("READY", "LEAVING"), ("READY", "LOADED"),
    ("LEAVING", "ABSENT"), ("LEAVING", "LOADED"),
}  # fmt: skip


@pytest.mark.parametrize("before", StageState)
@pytest.mark.parametrize("after", StageState)
def test_a_rank_moves_as_the_table_says_and_not_otherwise(before: StageState, after: StageState) -> None:
    member = Member(3, 1, state=before, since_ns=1)
    if (before.name, after.name) in MOVES:
        moved = member.moved(after, 7)
        assert (moved.state, moved.since_ns, moved.rank) == (after, 7, 3)
    else:
        with pytest.raises(InvalidMove, match=f"rank 3 is {before.name} and cannot become {after.name}"):
            member.moved(after, 7)


def test_a_message_at_the_wrong_time_ends_the_connection_and_changes_nothing() -> None:
    pipeline = MembersRig(2)
    assert pipeline.loaded(0) == [], "it has not even greeted"
    assert pipeline.dropped == [(0, "protocol")]
    assert pipeline.members[0].state is StageState.ABSENT
    assert pipeline.members[0].loaded is None
    pipeline.start()
    assert pipeline.hello(1) == [], "a second greeting on the same connection"
    assert pipeline.dropped[1:] == [(1, "protocol")]
    assert pipeline.members.formed, "the epoch is lost when the connection is gone, not before"
    assert pipeline.lose(1, "protocol")[1] == EpochLost(1, "stage 1: protocol", 1)


def test_weights_that_are_loaded_twice_end_the_connection_and_not_the_epoch() -> None:
    pipeline = loaded_pipeline()
    pipeline.say(0, wire.StoreOpened(1, 4000))
    assert pipeline.members[1].state is StageState.FORMING
    assert pipeline.loaded(1) == []
    assert pipeline.dropped == [(1, "protocol")]
    assert pipeline.members[1].state is StageState.FORMING, "else it would wait for ever, and the others for it"


def test_a_rank_cannot_report_another_stages_step() -> None:
    pipeline = MembersRig(2)
    pipeline.start()
    assert pipeline.say(1, result(1)) == [], "the result names stage 0"
    assert len(pipeline.say(0, result(1))) == 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gpu": 0}, "stage 1 came back with a GPU instead of a CPU"),
        ({"dtype": "bfloat16"}, "stage 1 came back with dtype bfloat16 instead of float32"),
        ({"quantization": "int8"}, "stage 1 came back with quantization int8 instead of none"),
        ({"kv_dtype": "int8"}, "stage 1 came back with kv-dtype int8 instead of float32"),
        ({"name": "elsewhere"}, "stage 1 came back with another machine, elsewhere instead of same name"),
        ({"architecture": OTHER}, "stage 1 came back with another model in /m"),
        ({"weights": "trained on", "checkpoint": "/n"}, "stage 1 came back with other weights in /n"),
        ({"machine": "started anew"}, None),
        ({}, None),
    ],
)
def test_a_stage_that_comes_back_different_is_refused(changes: dict[str, object], named: str | None) -> None:
    pipeline = MembersRig(2)
    pipeline.start()
    before = pipeline.members[1].hello
    assert before is not None
    pipeline.lose(1, "exit")
    events = pipeline.say(1, changed(before, **changes))
    assert events == ([] if named is None else [FatalError(named, usage=True)])


def test_mistakes_before_the_first_epoch_are_the_operators() -> None:
    pipeline = MembersRig(1, mistake=ConfigError("--layers", "no"))
    assert pipeline.hello(0) == [FatalError("--layers: no", usage=True)]
    assert pipeline.say(0, wire.GaveUp("bad file")) == [FatalError("bad file", usage=True)]
