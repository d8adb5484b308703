"""A stage is lost: nobody's tokens change, and only a request that kills stages fails."""

from __future__ import annotations

import pytest

from ppserve.core.plan import Drawn, StepResult
from ppserve.core.request import FinishReason, OutputOptions
from ppserve.errors import RequestFailed
from tests.core.scheduling.house import House, a_house, a_request, fill
from tests.core.toy_pipeline import STAMPS, expected_answer


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("commits_before", range(0, 24, 3))
def test_a_loss_at_any_moment_changes_nobodys_tokens(num_stages: int, commits_before: int) -> None:
    house = a_house(num_stages, prefill_chunk=5)
    for i in range(6):
        house.submit(a_request(f"r{i}", num_prompt=3 + 4 * i, max_tokens=8, num_sequences=1 + i % 3))
    for _ in range(commits_before):
        fill(house)
        house.commit_one()
    fill(house)
    house.lose_stage()
    house.scheduler.check_invariants()
    house.drain()
    house.check_answers()


def test_results_of_an_older_epoch_are_ignored() -> None:
    house = a_house(num_stages=1)
    house.submit(a_request("r"))
    plan = house.schedule_one()
    assert plan is not None
    house.lose_stage()
    stale = StepResult(plan.epoch, plan.step_id, 0, STAMPS, 0, (Drawn(0, 1),))
    assert house.scheduler.commit(stale, 0.0) == []
    unknown = StepResult(house.scheduler.epoch, 999, 0, STAMPS)
    assert house.scheduler.commit(unknown, 0.0) == []
    house.drain()
    house.check_answers()
    assert {p.epoch for p in house.pipeline.plans} == {1}


def test_what_was_told_is_not_told_again() -> None:
    house = a_house(num_stages=1)
    house.submit(a_request("r", num_prompt=9, max_tokens=8, output=OutputOptions(prompt_logprobs=0)))
    for _ in range(4):
        fill(house)
        house.commit_one()
    house.lose_stage()
    house.drain()
    house.check_answers()
    assert sum(bool(e.prompt_logprobs) for e in house.events["r", 0]) == 1
    replay = next(p for p in house.pipeline.plans if p.epoch == 1)
    assert replay.slices[0].token_ids[9:] == expected_answer(house.requests["r"]).token_ids[:4]
    assert replay.slices[0].targets == ()


def test_a_prompt_half_scored_is_scored_again() -> None:
    house = a_house(num_stages=1, prefill_chunk=4)
    house.submit(a_request("r", num_prompt=11, output=OutputOptions(prompt_logprobs=0)))
    fill(house)
    house.commit_one()
    house.lose_stage()
    house.drain()
    house.check_answers()


def test_the_ended_are_released_with_the_loss() -> None:
    house = a_house(num_stages=2)
    house.submit(a_request("r"))
    fill(house)
    house.tell(house.scheduler.abort("r", FinishReason.CANCELLED))
    assert house.scheduler.kv_usage > 0
    house.lose_stage()
    assert house.scheduler.kv_usage == 0
    assert not house.scheduler.has_work


def test_a_common_beginning_is_replayed_once() -> None:
    house = a_house(num_stages=1, num_blocks=800, block_size=4, prefill_chunk=100)
    house.submit(a_request("first", num_prompt=90, salt=1, max_tokens=40))
    fill(house)
    house.commit_one()
    for i in range(10):
        house.submit(a_request(f"r{i}", num_prompt=90, salt=1, max_tokens=40))
    for _ in range(3):
        fill(house)
        house.commit_one()
    house.lose_stage()
    house.drain()
    house.check_answers()
    computed = sum(p.num_tokens for p in house.pipeline.plans if p.epoch == 1)
    assert computed < 3 * 90 + 11 * 40, "eleven times the prompt would be 990"


def test_siblings_that_have_not_begun_survive_the_loss_of_their_source() -> None:
    """The leader has ended, the siblings have not copied their block yet: they compute it themselves."""
    house = a_house(num_stages=1, prefix_cache=False)
    house.submit(a_request("r", num_prompt=7, max_tokens=1, num_sequences=4))
    fill(house)
    assert [e.index for e in house.commit_one()] == [0]
    house.lose_stage()
    house.scheduler.check_invariants()
    house.drain()
    house.check_answers()


# ---- quarantine ----


def run_with_poison(house: House, poison: str, at_token: int) -> int:
    """Loses a stage whenever a step would compute token number `at_token` of `poison`; counts losses."""
    losses = 0
    ids = {s.id for s in house.scheduler._groups[poison].sequences}
    deadly = len(house.requests[poison].prompt_ids) + at_token
    while house.scheduler.has_work:
        fill(house)
        step = house.pipeline._queue[0]
        if any(s.sequence_id in ids and s.end >= deadly for s in step.slices):
            house.lose_stage()
            losses += 1
            assert losses < 10
        else:
            house.commit_one()
        house.scheduler.check_invariants()
    return losses


@pytest.mark.parametrize("at_token", [0, 3])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_only_the_request_that_kills_stages_fails(num_stages: int, at_token: int) -> None:
    house = a_house(num_stages, num_blocks=2000)
    for i in range(16):
        house.submit(a_request(f"r{i}", num_prompt=5 + i, max_tokens=12))
    losses = run_with_poison(house, "r7", at_token)
    assert losses == 3, "in company, replayed in company, replayed alone"
    (poisoned,) = [events for (name, _), events in house.events.items() if name == "r7"]
    assert isinstance(poisoned[-1].error, RequestFailed)
    assert len([e for e in poisoned if e.token_id is not None]) == at_token
    del house.requests["r7"]
    house.check_answers()


def test_a_poisonous_request_without_company_fails_too() -> None:
    house = a_house(2)
    house.submit(a_request("r", num_sequences=3))
    assert run_with_poison(house, "r", 0) == 3
    assert all(isinstance(events[-1].error, RequestFailed) for events in house.events.values())
    assert len(house.events) == 3


def test_suspects_run_alone_and_everybody_else_waits() -> None:
    house = a_house(num_stages=4, prefill_chunk=4)
    for i in range(3):
        house.submit(a_request(f"r{i}", num_prompt=9))
    for _ in range(2):
        fill(house)
        house.lose_stage()
    house.submit(a_request("newcomer"))
    assert house.scheduler.num_waiting == 1, "nobody is admitted meanwhile"
    alone = fill(house)
    assert {s.sequence_id for plan in alone for s in plan.slices} == {0}
    while {s.sequence_id for plan in alone for s in plan.slices} == {0}:
        house.commit_one()
        alone = fill(house) or alone
    assert {s.sequence_id for plan in alone for s in plan.slices} == {1}
    house.drain()
    house.check_answers()


def test_the_next_suspect_waits_until_the_last_step_of_the_one_before_is_back() -> None:
    house = a_house(num_stages=2, prefill_chunk=9, prefix_cache=False)
    house.submit(a_request("first", num_prompt=9, num_sequences=2))
    house.submit(a_request("second", num_prompt=9))
    house.scheduler.set_microbatches(3)
    for _ in range(2):
        fill(house)
        house.lose_stage()
    assert house.scheduler._quarantine.lone == "first"
    while house.scheduler.has_work:
        fill(house)
        in_flight = {s.sequence_id for plan in house.pipeline._queue for s in plan.slices}
        if house.scheduler._quarantine.lone is not None:
            assert in_flight <= {0, 1} or in_flight == {2}, "two requests at once"
        house.commit_one()
    house.check_answers()


def test_losses_with_progress_between_them_are_nobodys_fault() -> None:
    house = a_house(num_stages=2)
    for i in range(4):
        house.submit(a_request(f"r{i}", max_tokens=40))
    for _ in range(8):
        fill(house)
        house.lose_stage()
        for _ in range(6):
            fill(house)
            house.commit_one()
        fill(house)
        assert house.steps.num_in_flight == 2, "nobody is alone"
    house.drain()
    house.check_answers()


def test_a_suspect_that_is_cancelled_lets_the_others_go_on() -> None:
    house = a_house(num_stages=2)
    for i in range(2):
        house.submit(a_request(f"r{i}", num_prompt=9))
    for _ in range(2):
        fill(house)
        house.lose_stage()
    house.tell(house.scheduler.abort("r0", FinishReason.CANCELLED))
    house.drain()
    house.check_answers()


# ---- controls ----


def test_the_control_a_replay_that_forgets_the_loss_is_noticed() -> None:
    """Losing the keys without telling the scheduler must not go unseen."""
    house = a_house(num_stages=1)
    house.submit(a_request("r", max_tokens=20))
    fill(house)
    house.commit_one()
    house.pipeline.lose()
    with pytest.raises(KeyError):
        house.drain()


def test_the_control_a_wrong_token_is_noticed() -> None:
    house = a_house(num_stages=1)
    house.submit(a_request("r"))
    house.drain()
    right = house.events["r", 0]
    house.events["r", 0] = right[:2] + right[3:]
    with pytest.raises(AssertionError):
        house.check_answers()
