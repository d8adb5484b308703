"""Which draft tokens are computed, and when: the scheduler on a toy pipeline, with a drafter that always draft
tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest

from ppserve.core.cost_model import StepSize
from ppserve.core.plan import SPECULATIVE, StepPlan, StepResult
from ppserve.core.request import FinishReason, OutputOptions, Request, SamplingParams, StopConditions
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.drafter import Drafter, DraftToken, NewDrafter
from ppserve.core.scheduling.speculation import PAUSE_S
from ppserve.core.scheduling.speculation_trial import Way
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
    """right: the answer that it knows; without it, it draft tokens some token."""

    def __init__(self, request: Request, right: Seq[int]) -> None:
        self._known = (*request.prompt_ids, *right)

    def draft_token(self, token_ids: Seq[int], draft_tokens: Seq[int]) -> DraftToken | None:
        place = len(token_ids) + len(draft_tokens)
        return DraftToken(self._known[place] if place < len(self._known) else 1, 0.9)


def some(request: Request, _index: int) -> Drafter:
    return Always(request, ())


def right(request: Request, index: int) -> Drafter:
    return Always(request, expected_answer(request, index).token_ids)


def a_rig(
    speculate: int | None,
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
    rig.submit(a_request("drafted", num_prompt=2, max_tokens=40))
    assert [plan.phase for plan in fill(rig)] == ["prefill"] + [SPECULATIVE] * (NUM_STAGES - 1)
    for number in range(1, NUM_STAGES):
        rig.submit(a_request(f"new {number}", num_prompt=2))
        (plan,) = fill(rig)
        assert plan.phase == "prefill"
    rig.drain()
    rig.check_answers()


def test_requests_that_arrive_go_before_guesses() -> None:
    """Steps on draft tokens alone are cancelled, and nothing is drafted before the new client has his first
    token."""

    def sent() -> list[tuple[str, int]]:
        plans = fill(rig)
        for plan in plans:
            first_stage_reports(rig, plan)
        plans += fill(rig)
        return [(plan.phase, sum(piece.num_draft_tokens for piece in plan.slices)) for plan in plans]

    def commit_one() -> None:
        rig.commit_one()
        rig.scheduler._speculation._trial.way = Way.DEEP  # the trial would begin without

    rig = a_rig(None, SameCosts(), new_drafter=right)
    rig.scheduler._speculation._trial.way = Way.DEEP
    rig.submit(a_request("stream", max_tokens=40))
    assert sent() == [("prefill", 0)], "its own first token goes first as well"
    commit_one()
    (_, num_wide), (phase, num_deep) = sent()
    assert (num_wide > 0, phase, num_deep > 0) == (True, SPECULATIVE, True)
    rig.submit(a_request("new_client", max_tokens=9))
    assert rig.scheduler.slots._doomed, "it was cancelled"
    assert sent() == [("prefill", 0)]
    commit_one()  # the stream's
    assert sent() == [("decode", 0)]
    rig.commit_one()  # what was cancelled
    assert rig.scheduler.slots.draft_tokens["cancelled"] == num_deep
    commit_one()  # the new client's
    rig.drain()
    assert rig.scheduler.slots.draft_tokens["rejected"] == 0
    rig.check_answers()


def test_after_a_request_came_beside_others_nothing_is_guessed_for_a_while() -> None:
    """And the trial of ways learns nothing of that while. Who comes to an empty pipeline begins no pause."""
    rig = a_rig(None, SameCosts(), num_stages=1, new_drafter=right)
    trial, observed = rig.scheduler._speculation._trial, []
    trial.observe = lambda _number, began_s, *_: observed.append(began_s)  # type: ignore[method-assign]
    trial.way = Way.WIDE

    def guesses_of_a_step(sent_s: float, committed_s: float) -> int:
        before = rig.num_draft_tokens
        rig.now = sent_s
        fill(rig)
        rig.now = committed_s
        rig.commit_one()
        return rig.num_draft_tokens - before

    rig.submit(a_request("short", max_tokens=1))
    guesses_of_a_step(0.0, 0.1)
    rig.submit(a_request("stream", max_tokens=400))
    guesses_of_a_step(0.1, 0.9)
    assert guesses_of_a_step(0.9, 1.0) > 0, "nobody came beside it"
    rig.submit(a_request("new_client", max_tokens=1))
    guesses_of_a_step(1.0, 1.5)
    assert guesses_of_a_step(1.5, 2.9) == 0
    assert guesses_of_a_step(2.9, 3.1) == 0
    assert guesses_of_a_step(3.1, 3.2) > 0
    assert guesses_of_a_step(3.2, 3.3) > 0
    assert observed == [0.9, 3.1, 3.2]
    # Whoever comes in a pause makes it longer.
    for came_s in (5.0, 6.5):
        rig.now = came_s
        rig.submit(a_request(f"at {came_s}", max_tokens=1))
        guesses_of_a_step(came_s, came_s + 0.1)
    assert guesses_of_a_step(8.4, 8.45) == 0
    assert guesses_of_a_step(6.5 + PAUSE_S, 8.6) > 0


def test_no_step_has_more_guesses_of_a_sequence_than_were_asked_for() -> None:
    rig = a_rig(2)
    rig.submit(a_request("r", num_prompt=1, max_tokens=40))
    known, *deep = fill(rig)
    assert [piece.num_draft_tokens for piece in known.slices] == [2]
    assert [[piece.num_draft_tokens for piece in plan.slices] for plan in deep] == [[2]] * (NUM_STAGES - 1)


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
    request_queue = rig.scheduler.request_queue
    assert request_queue.queue.served("c") == 1 + 4
    assert others[-1].is_terminal == (max_tokens == 4)
    request_queue.finish(first.sequence_id, FinishReason.STOP_STRING)
    for event in others:
        request_queue.token_withheld(event.caller)
    assert request_queue.queue.served("c") == 1 + 1
    assert not request_queue.groups


def test_a_block_is_found_by_others_when_all_its_tokens_are_known() -> None:
    """The first step has draft tokens up to the end of the block, all of them wrong."""
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


LINES = {
    "the end token": (StopConditions(20), {}),
    "a stop token": (StopConditions(20, stop_token_ids=(40,), ignore_eos=True), {}),
    "the length": (StopConditions(5, ignore_eos=True), {}),
    "the context": (StopConditions(5, ignore_eos=True), {"limited_by_context": True}),
    "min_tokens": (StopConditions(20, min_tokens=12, stop_token_ids=tuple(range(0, 41, 3))), {}),
    "penalties": (StopConditions(12, ignore_eos=True), {"sampling": SamplingParams(repetition_penalty=1.3)}),
    "log-probabilities of the prompt": (StopConditions(5), {"output": OutputOptions(prompt_logprobs=1)}),
    "several answers": (StopConditions(9), {"num_sequences": 3}),
}


def beyond(request: Request, index: int) -> Drafter:
    """Right up to the end of the answer, and on without minding what ended it."""
    stop = replace(request.stop, max_tokens=60, stop_token_ids=(), ignore_eos=True)
    if request.stop.min_tokens:
        stop = replace(request.stop, min_tokens=60, max_tokens=60)
    endless = replace(request, stop=stop)
    return Always(request, expected_answer(endless, index).token_ids)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("new_drafter", [some, right, beyond])
def test_what_a_request_asks_for_holds_among_guesses(line: str, num_stages: int, new_drafter: NewDrafter) -> None:
    stop, fields = LINES[line]
    rig = a_rig(6, num_stages=num_stages, new_drafter=new_drafter)
    request = a_request("v", stop=stop, **fields)  # EOS is its sixth token
    rig.submit(request)
    rig.drain()
    rig.check_answers()
    accepted = rig.scheduler.slots.draft_tokens["accepted"]
    assert (accepted > 0) == (new_drafter is not some), "what was shown was shown among draft tokens"
    longest = max(len(expected_answer(request, index).token_ids) for index in range(request.num_sequences))
    assert longest > 3, "there was room for draft tokens"


def test_guesses_stay_within_the_blocks_that_were_reserved() -> None:
    """The pipeline has as many as the request needs, without draft tokens."""
    config = SchedulerConfig(2, block_size=4, eos_id=EOS_ID, speculate=16)
    rig = SchedulerRig(config, num_blocks=4, new_drafter=some)
    rig.submit(a_request("r", num_prompt=5, max_tokens=12))  # 16 positions: the last token has none
    ends = []
    while rig.has_work:
        for plan in fill(rig):
            (piece,) = plan.slices
            assert len(piece.block_table) * 4 >= piece.end
            ends.append(piece.end)
        rig.commit_one()
    assert max(ends) == 16
    rig.check_answers()


@pytest.mark.parametrize("skips", [True, False])
def test_whoever_leaves_among_guesses_holds_nothing_once_his_steps_are_back(*, skips: bool) -> None:
    rig = a_rig(2)
    rig.skips = lambda: skips
    rig.submit(a_request("leaves", max_tokens=40))
    _, *deep = fill(rig)
    assert len(deep) == NUM_STAGES - 1
    rig.tell(rig.scheduler.request_queue.abort("leaves", FinishReason.CANCELLED))
    assert rig.scheduler.slots._doomed == [plan.step_id for plan in deep]
    rig.submit(a_request("stays", max_tokens=5))
    rig.drain()  # in the end no block is held
    rig.check_answers()
    assert len(rig.events["leaves", 0]) == 1


@pytest.mark.parametrize("num_generated", [1, 7])
def test_a_loss_among_guesses_costs_no_token(num_generated: int) -> None:
    rig = a_rig(3, num_stages=2, new_drafter=right)
    rig.submit(a_request("r", max_tokens=30))
    while len(rig.events["r", 0]) < num_generated:
        fill(rig)
        rig.commit_one()
    fill(rig)
    assert rig.steps.num_in_flight > rig.steps.num_known
    rig.lose_stage()
    rig.drain()
    rig.check_answers()


def test_a_resumed_answer_is_guessed_from_where_it_was() -> None:
    rig = a_rig(3, num_stages=2, new_drafter=right)
    whole = a_request("r", max_tokens=20)
    resumed = replace(whole, resume_index=0, resume_ids=expected_answer(whole).token_ids[:9])
    rig.submit(resumed)
    rig.drain()
    rig.check_answers()
    assert rig.scheduler.slots.draft_tokens["accepted"] > 0
