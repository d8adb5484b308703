"""Which guesses are computed, and when: the scheduler on a toy pipeline, with a drafter that always guesses."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest

from ppserve.core.cost_model import StepSize
from ppserve.core.plan import SPECULATIVE, StepPlan, StepResult
from ppserve.core.request import FinishReason, Request, StopConditions
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.drafter import Drafter, Guess, NewDrafter
from tests.core.scheduling.rig import SchedulerRig, a_request, fill
from tests.core.toy_pipeline import EOS_ID, STAMPS, expected_answer

NUM_STAGES = 4


class SameCosts:
    """Every step takes 10 ms on every stage."""

    def predict(self, _size: StepSize) -> float:
        return 0.01

    def predict_each(self, _size: StepSize) -> Seq[float]:
        return [0.01] * NUM_STAGES


class Always:
    """right: the answer that it knows; without it, it guesses some token."""

    def __init__(self, request: Request, right: Seq[int]) -> None:
        self._known = (*request.prompt_ids, *right)

    def guess(self, token_ids: Seq[int], guesses: Seq[int]) -> Guess | None:
        place = len(token_ids) + len(guesses)
        return Guess(self._known[place] if place < len(self._known) else 1, 0.9)


def some(request: Request, _index: int) -> Drafter:
    return Always(request, ())


def right(request: Request, index: int) -> Drafter:
    return Always(request, expected_answer(request, index).token_ids)


def a_rig(
    speculate: int,
    costs: SameCosts | None = None,
    num_stages: int = NUM_STAGES,
    new_drafter: NewDrafter = some,
) -> SchedulerRig:
    config = SchedulerConfig(num_stages, block_size=4, eos_id=EOS_ID, speculate=speculate)
    return SchedulerRig(config, 400, costs, new_drafter)


def first_stage_reports(rig: SchedulerRig, plan: StepPlan) -> None:
    assert rig.steps.reported(StepResult(plan.epoch, plan.step_id, 0, STAMPS), 0) is not None


def test_a_step_on_guesses_is_sent_when_the_first_stage_has_nothing_before_it() -> None:
    rig = a_rig(1, SameCosts())
    rig.submit(a_request("lone", num_prompt=1, max_tokens=40))
    (plan,) = fill(rig)
    for _ in range(1, NUM_STAGES):
        first_stage_reports(rig, plan)
        (plan,) = fill(rig)
        assert plan.phase == SPECULATIVE
    first_stage_reports(rig, plan)
    assert fill(rig) == [], "no stage would stand idle"


def test_requests_that_arrive_find_a_lane_beside_any_number_of_guesses() -> None:
    rig = a_rig(1)
    rig.submit(a_request("guessed", num_prompt=2, max_tokens=40))
    assert [plan.phase for plan in fill(rig)] == ["prefill"] + [SPECULATIVE] * (NUM_STAGES - 1)
    for number in range(1, NUM_STAGES):
        rig.submit(a_request(f"new {number}", num_prompt=2))
        (plan,) = fill(rig)
        assert plan.phase == "prefill"
    rig.drain()
    rig.check_answers()


def test_no_step_has_more_guesses_of_a_sequence_than_were_asked_for() -> None:
    rig = a_rig(2)
    rig.submit(a_request("r", num_prompt=1, max_tokens=40))
    known, *deep = fill(rig)
    assert [piece.num_guesses for piece in known.slices] == [2]
    assert [[piece.num_guesses for piece in plan.slices] for plan in deep] == [[2]] * (NUM_STAGES - 1)


def test_the_last_token_of_a_prompt_takes_no_guesses_before_the_rest_is_known() -> None:
    """A slice of one token may still be a part of a prompt, which draws nothing."""
    config = SchedulerConfig(1, block_size=4, eos_id=EOS_ID, speculate=3, prefill_chunk=1)
    rig = SchedulerRig(config, 400, None, some)
    rig.submit(a_request("r", num_prompt=3))
    widths = []
    while rig.has_work:
        (plan,) = fill(rig)
        widths.append(plan.num_tokens)
        rig.commit_one()
    assert widths[:3] == [1, 1, 4]


@pytest.mark.parametrize("max_tokens", [40, 4])
def test_tokens_after_a_stop_string_are_charged_to_nobody(max_tokens: int) -> None:
    """Also where the step that brings it ends the answer by its length as well."""
    rig = a_rig(3, num_stages=1, new_drafter=right)
    rig.submit(a_request("r", num_prompt=1, max_tokens=max_tokens, caller="c"))
    fill(rig)
    first, *others = rig.commit_one()
    assert len(others) == 3
    intake = rig.scheduler.intake
    assert intake.queue.served("c") == 1 + 4
    assert others[-1].is_terminal == (max_tokens == 4)
    intake.finish(first.sequence_id, FinishReason.STOP_STRING)
    for event in others:
        intake.token_withheld(event.caller)
    assert intake.queue.served("c") == 1 + 1
    assert not intake.groups


def test_a_block_is_found_by_others_when_all_its_tokens_are_known() -> None:
    """The first step has guesses up to the end of the block, all of them wrong."""
    rig = a_rig(7, num_stages=1)
    request = a_request("first", num_prompt=1, max_tokens=20)
    rig.submit(request)
    (plan,) = fill(rig)
    assert plan.num_tokens == 8
    rig.drain()
    answer = expected_answer(request).token_ids
    again = replace(a_request("again"), prompt_ids=(*request.prompt_ids, *answer), stop=StopConditions(2))
    rig.submit(again)
    rig.drain()
    assert rig.events["again", 0][0].cached_tokens == 20
    rig.check_answers()
