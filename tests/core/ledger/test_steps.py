"""The book of steps: which are in flight, which stages owe results, what was transferred, what else takes time."""

from __future__ import annotations

import pytest
from msgspec import structs

from ppserve.core.ledger.steps import STEP_DEADLINE_NS, Steps, Transfer
from ppserve.core.ledger.tensor_ranks import TensorRanks
from ppserve.core.plan import Drawn, RankResult, Slice, StepPlan, StepResult, StepStamps
from tests.core.artificial import plan

S = 1_000_000_000
MS = 1_000_000


def result(
    step_id: int, stage: int, begun: int = 0, ended: int = 0, *, epoch: int = 1, num_bytes: int = 0
) -> StepResult:
    return StepResult(
        epoch=epoch,
        step_id=step_id,
        stage=stage,
        stamps=StepStamps(begun, begun, begun, begun, ended, ended),
        bytes_sent=num_bytes,
    )


def test_a_step_is_in_flight_until_the_last_stage_reports_and_in_the_book_until_all_have() -> None:
    steps = Steps(3)
    step = steps.sent(plan(0), 5, 7, num_slots=3)
    assert (steps.num_in_flight, len(steps), step.first_owing()) == (1, 1, 0)
    assert steps.reported(result(0, 2), 20) is step
    assert (steps.num_in_flight, len(steps), step.returned_ns) == (0, 1, 20)
    steps.reported(result(0, 0), 21)
    assert (step.first_owing(), step.is_complete) == (1, False)
    steps.reported(result(0, 1), 22)
    assert (step.is_complete, len(steps), step.returned_ns) == (True, 0, 20)


def test_a_step_knows_whether_it_fills_the_pipeline_and_the_slots() -> None:
    steps = Steps(2)
    sent = [steps.sent(plan(k), 0, 0, num_slots=3) for k in range(3)]
    assert [step.fills_pipeline for step in sent] == [False, True, True]
    assert [step.fills_slots for step in sent] == [False, False, True]


def test_a_transfer_is_known_once_both_ends_have_reported_whichever_is_first() -> None:
    sender = StepResult(epoch=1, step_id=0, stage=0, stamps=StepStamps(0, 0, 0, 0, 10, 13), bytes_sent=64)
    for waiting, expected in (
        (5, Transfer(0, 64, 3, 8, 5)),
        (12, Transfer(0, 64, 3, 6, 5)),
        (16, Transfer(0, 64, 3, 2, None)),
    ):
        receiver = StepResult(epoch=1, step_id=0, stage=1, stamps=StepStamps(0, waiting, 18, 18, 20, 20))
        for first, second in ((sender, receiver), (receiver, sender)):
            steps = Steps(2)
            step = steps.sent(plan(0), 0, 0, num_slots=2)
            steps.reported(first, 1)
            assert list(step.transfers(first.stage)) == []
            steps.reported(second, 2)
            assert list(step.transfers(second.stage)) == [expected]


def test_the_first_stage_that_owes_the_oldest_step_is_stuck_once_nothing_has_moved_for_too_long() -> None:
    steps = Steps(2)
    assert steps.stuck(10**18) is None, "nothing is owed"
    steps.sent(plan(0), S, S, num_slots=2)
    assert steps.stuck(S + STEP_DEADLINE_NS) is None
    assert steps.stuck(S + STEP_DEADLINE_NS + 1) == (0, 0)
    steps.reported(result(0, 0, S, 2 * S), 2 * S)
    # A row is known to take 1 s now, so the deadline is 10 s + 5 * 1 s.
    assert steps.stuck(17 * S) is None
    assert steps.stuck(17 * S + 1) == (0, 1)
    steps.head_paused(20 * S)
    assert steps.stuck(35 * S) is None
    steps.lost()
    assert steps.stuck(10**18) is None


@pytest.mark.parametrize(("num_rows", "deadline_s"), [(1, 10.5), (20, 20), (100, 60), (200, 60)])
def test_a_stage_may_take_the_longer_for_a_step_the_more_rows_it_has(num_rows: int, deadline_s: float) -> None:
    """A row is known to take 0.1 s. Five times as long is allowed, and ten seconds more, but a minute at most."""
    steps = Steps(1)
    steps.sent(plan(0), 0, 0, num_slots=1)
    steps.reported(result(0, 0, S, S + S // 10), 2 * S)
    slice_ = Slice(0, 0, (1,) * num_rows, (0,))
    steps.sent(StepPlan(plan(0).epoch, 1, 0, (slice_,)), 2 * S, 2 * S, num_slots=1)
    due_ns = 2 * S + int(deadline_s * S)
    assert steps.stuck(due_ns) is None
    assert steps.stuck(due_ns + 1) == (1, 0)


# ---- the results of a stage's tensor ranks as one: computing and waiting are the whole step -----------------


def rank_result(place: int, begun: int, ended: int, gathered: int, drawn: tuple[Drawn, ...] = ()) -> RankResult:
    stamps = StepStamps(begun - 3, begun - 2, begun - 1, begun, ended, ended + 1)
    return RankResult(
        epoch=1, step_id=7, place=place, stamps=stamps, bytes_sent=10, drawn=drawn, gathered_ns=gathered
    )


def test_a_stage_has_reported_when_all_its_ranks_have() -> None:
    ranks = TensorRanks(2, 3)
    assert ranks.add_result(rank_result(4, 100, 200, 20)) is None
    assert ranks.owing_places(7, 1) == (3, 5)
    assert ranks.add_result(rank_result(3, 90, 210, 30, (Drawn(1, 5),))) is None
    assert ranks.owing_places(7, 1) == (5,)
    stage = ranks.add_result(rank_result(5, 110, 190, 0))
    assert stage is not None
    assert (stage.stage, stage.drawn, stage.bytes_sent) == (1, (Drawn(1, 5),), 30)
    assert (stage.stamps.begun, stage.stamps.ended, stage.stamps.planned) == (90, 210, 87)
    # Each rank computed 90, 80 and 80 of the stage's 120.
    assert ranks.gathered_ns == [[0, 0, 0], [30, 40, 40]]
    assert (stage.gathered_ns, stage.computed_ns) == (36, 84)


def test_ranks_that_overtake_each_other_are_not_counted_twice() -> None:
    """The second rank begins its next step at 160, while the first computes until 200."""
    ranks, stages = TensorRanks(1, 2), []
    steps = (1, (100, 200), (100, 150)), (2, (210, 300), (160, 300)), (3, (300, 400), (300, 360))
    for step_id, first, second in steps:
        for place, (begun, ended) in enumerate((first, second)):
            stage = ranks.add_result(structs.replace(rank_result(place, begun, ended, 0), step_id=step_id))
        assert stage is not None
        stages.append(stage)
    assert [(stage.stamps.begun, stage.stamps.ended) for stage in stages] == [(100, 200), (200, 300), (300, 400)]
    # Of the 300 from 100 to 400 the first rank computed 290, the second 250: 50, 140 and 60.
    assert ranks.gathered_ns == [[10, 50]]
    # The second step's 100 hold 115 of computing on average: the third has waited 15 less than its own 20.
    assert [stage.gathered_ns for stage in stages] == [25, 0, 5]


def test_what_a_lost_epoch_left_is_forgotten() -> None:
    ranks = TensorRanks(1, 2)
    alone = TensorRanks(2, 1).add_result(one := rank_result(1, 100, 200, 0))
    assert alone is not None
    assert (alone.stage, alone.stamps, alone.bytes_sent) == (1, one.stamps, one.bytes_sent), (
        "one rank is its stage"
    )
    assert ranks.add_result(rank_result(0, 100, 200, 0)) is None
    ranks.lost()
    assert ranks.add_result(rank_result(1, 100, 200, 0)) is None
    assert ranks.add_result(rank_result(0, 100, 200, 0)) is not None
