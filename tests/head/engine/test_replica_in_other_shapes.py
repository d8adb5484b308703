"""A replica whose layers are divided anew: its requests, its time, and who is blamed for a loss."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest

from ppserve import wire
from ppserve.core.architecture import Split
from ppserve.core.scheduling.sequence import SequenceEvent
from ppserve.head.engine.member import StageState
from tests.core.scheduling.rig import a_request
from tests.head.engine.replica_rig import MS, Rig, formed
from tests.head.engine.scripted import NUM_BLOCKS, SECOND


def leave_for(rig: Rig, split: Split) -> None:
    """Divide the layers anew; all ranks leave the epoch."""
    epoch = rig.replica.members.epoch
    rig.replica.reshape(split, Future())
    for rank in rig.ranks:
        rig.say(rank, wire.Broken(epoch, "told"))


def reshape(rig: Rig, split: Split, num_blocks: int = NUM_BLOCKS) -> list[SequenceEvent]:
    """All ranks leave the epoch, load their layers and join the next one. Returns the events."""
    leave_for(rig, split)
    for rank in rig.members.ranks_in_use:
        rig.loaded(rank, num_blocks=num_blocks)
    return [event for events in rig.join() for event in events]


def test_with_other_numbers_of_stages_requests_go_on_and_every_stages_time_adds_up() -> None:
    rig = formed(3, microbatches=1, max_num_seqs=4)
    rig.submit("a", max_tokens=5)
    lost = rig.refill()[0]
    for split in (Split((8,)), Split((2, 2, 4)), Split((4, 4))):
        rig.now_ns += MS
        assert reshape(rig, split) == []
        (plan,) = rig.refill()
        assert plan.step_id > lost.step_id, "a step's number is not used twice"
        assert len(rig.members.ranks_in_use) == len(split.sublayers)
        events = rig.compute(plan)
        assert [event.token_id for event in events] == [3]
        lost = rig.refill()[0]
    reading = rig.replica.read()
    assert reading.steps == (3, 2, 1)
    assert reading.steps_in_shape == (1, 1)
    assert [times.computed_ns for times in reading.times] == [3 * MS, 2 * MS, MS]
    assert [times.computed_ns for times in reading.times_in_shape] == [MS, MS]
    assert [times.wall_ns for times in reading.times] == [rig.now_ns - SECOND] * 3
    assert rig.replica.busy_s() == (0.003, 0.002, 0.001)
    assert len(reading.ranks) == 2


def test_a_request_for_which_no_shape_has_room_any_more_ends_with_its_reason() -> None:
    rig = formed()
    rig.submit("a", max_tokens=5)
    rig.ask(replace(a_request("bb", max_tokens=110), num_sequences=2))
    event, _ = reshape(rig, Split((2, 6)), num_blocks=33)
    assert event.request_id == "bb"
    assert "no room any more" in str(event.error)
    assert len(rig.refill()) > 0, "the other one goes on"


def test_while_ranks_load_other_layers_the_reading_is_of_the_shape_before() -> None:
    """Its parts belong together: figures, layers, what each rank has loaded, and the number of blocks."""
    rig = formed(2, microbatches=1)
    before = rig.replica.read()

    def check_reading() -> None:
        now = rig.replica.read()
        assert (now.decision, now.num_blocks, now.serves) == (before.decision, NUM_BLOCKS + rig.ranks[0], False)
        loaded = [[member.loaded for member in of_stage] for of_stage in now.ranks]
        assert loaded == [[member.loaded for member in of_stage] for of_stage in before.ranks]

    rig.replica.reshape(Split((8,)), Future())
    check_reading()
    for rank in rig.ranks:
        rig.say(rank, wire.Broken(1, "told"))
        check_reading()
    rig.say(rig.ranks[0], wire.Loaded("cpu", 2, 2, 10, 10 * 40, None))
    assert rig.members.num_blocks == 40
    check_reading()
    rig.join()
    now = rig.replica.read()
    assert [layout.num_sublayers for layout in now.decision.layouts] == [8]
    assert (now.num_blocks, now.serves, len(now.ranks)) == (40, True, 1)
    assert now.ranks[0][0].loaded == wire.Loaded("cpu", 2, 2, 10, 10 * 40, None)


@pytest.mark.parametrize("cause", [None, "reshape", "restart"])
def test_who_was_in_flight_when_layers_changed_or_processes_were_replaced_is_not_blamed_for_what_follows(
    cause: str | None,
) -> None:
    """A rank dies while it loads, or one cannot leave. The control: it dies, and nothing else has ended the
    epoch."""
    rig = formed(2)
    for number in range(3):
        rig.submit("a" * (number + 1))
        assert rig.refill()
        epoch = rig.members.epoch
        if cause == "reshape":
            leave_for(rig, Split((2, 6) if number % 2 else (6, 2)))
        elif cause == "restart":
            rig.members.restart()
            for rank in rig.ranks:
                rig.lose(rank, "restart")
        for died in ("exit", "stuck"):
            rig.lose(rig.ranks[1], died)
            rig.hello(rig.ranks[1])
        for rank in rig.ranks:
            if rig.members[rank].state is StageState.ABSENT:
                rig.hello(rank)
            rig.loaded(rank)
        rig.wait(1)
        rig.join()
        assert rig.members.epoch == epoch + 1
        watched = [rig.request_queue.poison_isolation.watches("a" * (each + 1)) for each in range(number + 1)]
        assert any(watched) == (cause is None)


def test_nobody_is_blamed_for_the_death_of_a_rank_that_the_shape_does_not_use() -> None:
    """Who was in flight when the others were silent is known for what these may still do."""
    rig = formed(3)
    reshape(rig, Split((4, 4)))
    rig.submit("a")
    assert rig.refill()
    rig.wait(4, silent=(rig.ranks[0],))
    assert not rig.members.formed
    rig.lose(rig.ranks[2])
    assert not rig.request_queue.poison_isolation.watches("a")
    rig.lose(rig.ranks[0])
    assert rig.request_queue.poison_isolation.watches("a"), "the control"
