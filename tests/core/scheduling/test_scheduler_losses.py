"""Losing a stage: no request's tokens change."""

from __future__ import annotations

import pytest

from ppserve.core.plan import Drawn, StepResult
from ppserve.core.request import OutputOptions
from tests.core.scheduling.invariants import check_scheduler
from tests.core.scheduling.rig import a_request, a_rig, fill
from tests.core.toy_pipeline import STAMPS, expected_answer


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("commits_before", range(0, 24, 3))
def test_a_loss_at_any_moment_changes_no_token(num_stages: int, commits_before: int) -> None:
    rig = a_rig(num_stages, prefill_chunk=5)
    for i in range(6):
        rig.submit(a_request(f"r{i}", num_prompt=3 + 4 * i, max_tokens=8, num_sequences=1 + i % 3))
    for _ in range(commits_before):
        rig.turn()
    fill(rig)
    rig.lose_stage()
    check_scheduler(rig.scheduler)
    rig.finish()


def test_results_of_an_older_epoch_are_ignored() -> None:
    rig = a_rig(num_stages=1)
    rig.submit(a_request("r"))
    plan = rig.schedule_one()
    assert plan is not None
    rig.lose_stage()
    stale = StepResult(plan.epoch, plan.step_id, 0, STAMPS, 0, (Drawn(0, 1),))
    assert rig.scheduler.commit(stale, 0.0) == []
    unknown = StepResult(rig.scheduler.slots.epoch, 999, 0, STAMPS)
    assert rig.scheduler.commit(unknown, 0.0) == []
    rig.finish()
    assert {p.epoch for p in rig.pipeline.plans} == {1}


def test_events_are_not_repeated_after_a_loss() -> None:
    rig = a_rig(num_stages=1)
    rig.submit(a_request("r", num_prompt=9, max_tokens=8, output=OutputOptions(prompt_logprobs=0)))
    for _ in range(4):
        rig.turn()
    rig.lose_stage()
    rig.finish()
    assert sum(bool(e.prompt_logprobs) for e in rig.events["r", 0]) == 1
    replay = next(p for p in rig.pipeline.plans if p.epoch == 1)
    assert replay.slices[0].token_ids[9:] == expected_answer(rig.requests["r"]).token_ids[:4]
    assert replay.slices[0].targets == ()


def test_a_prompt_half_scored_is_scored_again() -> None:
    rig = a_rig(num_stages=1, prefill_chunk=4)
    rig.submit(a_request("r", num_prompt=11, output=OutputOptions(prompt_logprobs=0)))
    rig.turn()
    rig.lose_stage()
    rig.finish()


def test_a_common_beginning_is_replayed_once() -> None:
    rig = a_rig(num_stages=1, num_blocks=800, block_size=4, prefill_chunk=100)
    rig.submit(a_request("first", num_prompt=90, salt=1, max_tokens=40))
    rig.turn()
    for i in range(10):
        rig.submit(a_request(f"r{i}", num_prompt=90, salt=1, max_tokens=40))
    for _ in range(3):
        rig.turn()
    rig.lose_stage()
    rig.finish()
    computed = sum(p.num_tokens for p in rig.pipeline.plans if p.epoch == 1)
    assert computed < 3 * 90 + 11 * 40, "eleven times the prompt would be 990"


def test_siblings_that_have_not_begun_survive_the_loss_of_their_source() -> None:
    """The leader has ended: another sibling fills their common blocks."""
    rig = a_rig(num_stages=1, prefix_cache=False, prefill_chunk=7)
    rig.submit(a_request("r", num_prompt=7, max_tokens=1, num_sequences=4))
    assert [e.index for e in rig.turn()] == [0]
    rig.lose_stage()
    check_scheduler(rig.scheduler)
    rig.finish()


# ---- controls ----


def test_the_control_a_replay_that_forgets_the_loss_is_noticed() -> None:
    """If keys are lost and the scheduler is not told, answers must be wrong."""
    rig = a_rig(num_stages=1)
    rig.submit(a_request("r", max_tokens=20))
    rig.turn()
    rig.pipeline.lose()
    with pytest.raises(KeyError):
        rig.drain()


def test_the_control_a_wrong_token_is_noticed() -> None:
    rig = a_rig(num_stages=1)
    rig.submit(a_request("r"))
    rig.drain()
    right = rig.events["r", 0]
    rig.events["r", 0] = right[:2] + right[3:]
    with pytest.raises(AssertionError):
        rig.check_answers()
