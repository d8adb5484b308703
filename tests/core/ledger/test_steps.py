"""The book of steps: which are in flight, which stages owe results, what was transferred."""

from __future__ import annotations

from ppserve.core.ledger.steps import STEP_DEADLINE_NS, Steps, Transfer
from ppserve.core.plan import StepResult, StepStamps
from tests.core.artificial import plan

S = 1_000_000_000


def result(
    step_id: int, stage: int, begun: int = 0, ended: int = 0, *, epoch: int = 1, num_bytes: int = 0
) -> StepResult:
    return StepResult(epoch, step_id, stage, StepStamps(begun, begun, begun, begun, ended, ended), num_bytes)


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


def test_what_is_unknown_repeated_or_of_another_epoch_is_not_entered() -> None:
    steps = Steps(2)
    steps.sent(plan(0), 0, 0, num_slots=2)
    assert steps.reported(result(1, 0), 1) is None
    assert steps.reported(result(0, 0, epoch=2), 1) is None
    assert steps.reported(result(0, 0), 1) is not None
    assert steps.reported(result(0, 0), 2) is None
    steps.lost()
    assert steps.reported(result(0, 1), 3) is None
    assert (steps.num_in_flight, len(steps)) == (0, 0)


def test_a_step_knows_whether_it_fills_the_pipeline_and_the_slots() -> None:
    steps = Steps(2)
    sent = [steps.sent(plan(k), 0, 0, num_slots=3) for k in range(3)]
    assert [step.fills_pipeline for step in sent] == [False, True, True]
    assert [step.fills_slots for step in sent] == [False, False, True]


def test_a_transfer_is_known_once_both_ends_have_reported_whichever_is_first() -> None:
    sender = StepResult(1, 0, 0, StepStamps(0, 0, 0, 0, 10, 13), 64)
    for waiting, expected in (
        (5, Transfer(0, 64, 3, 8, 5)),
        (12, Transfer(0, 64, 3, 6, 5)),
        (16, Transfer(0, 64, 3, 2, None)),
    ):
        receiver = StepResult(1, 0, 1, StepStamps(0, waiting, 18, 18, 20, 20))
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
