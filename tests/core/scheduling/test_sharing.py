"""Sharing: several answers to one prompt, resumed answers, and equal prefixes."""

from __future__ import annotations

import pytest

from tests.core.scheduling.rig import a_request, a_rig, fill
from tests.simulated_stage import expected_answer


@pytest.mark.parametrize(("num_prompt", "rest"), [(41, 1), (44, 4)])
def test_the_full_blocks_of_the_prompt_of_n_answers_are_computed_once(num_prompt: int, rest: int) -> None:
    rig = a_rig(num_stages=2, block_size=4)
    rig.submit(a_request("r", num_prompt, max_tokens=1, num_sequences=8))
    assert rig.blocks.num_held == 10 + 8 * (-(-num_prompt // 4) - 10)
    rig.drain()
    assert sum(plan.num_tokens for plan in rig.pipeline.plans) == num_prompt + 7 * rest


def test_resumed_tokens_are_charged_as_a_prompt_is() -> None:
    answer = expected_answer(a_request("r", num_prompt=6, max_tokens=60)).token_ids
    rig = a_rig(max_num_seqs=1)
    rig.submit(a_request("r", num_prompt=6, max_tokens=60, resume_index=0, resume_ids=answer[:50], caller="a"))
    rig.drain()
    assert rig.request_queue.queue._accounts["a"].served == 6 + 60


# ---- prefix cache ----


@pytest.mark.parametrize(
    ("num_prompt", "config", "cached"),
    [
        (18, {}, [0, 16, 16]),
        (16, {}, [0, 12, 12]),
        (18, {"prefix_cache": False}, [0, 0, 0]),
        (18, {"per_caller": True}, [0, 16, 0]),
    ],
)
def test_equal_beginnings_are_computed_once_but_for_the_last_token(
    num_prompt: int, config: dict[str, bool], cached: list[int]
) -> None:
    """Each caller's are, if told so: else the number of cached tokens tells one caller what another has asked."""
    rig = a_rig(block_size=4, **config)  # type: ignore[arg-type]
    for number, caller in enumerate("aab"):
        rig.submit(a_request(f"r{number}", num_prompt, salt=1, caller=caller))
        rig.finish()
    assert [rig.events[f"r{number}", 0][0].cached_tokens for number in range(3)] == cached


def test_what_was_cached_when_a_request_began_is_told_though_a_loss_forgot_it() -> None:
    rig = a_rig(block_size=4)
    for name in ("first", "second"):
        rig.drain()
        rig.submit(a_request(name, num_prompt=18, salt=1))
    rig.turn()
    rig.lose_stage()
    rig.finish()
    assert {event.cached_tokens for event in rig.events["second", 0]} == {16}


def test_a_burst_shares_what_is_only_scheduled() -> None:
    rig = a_rig(num_stages=4, block_size=4, prefill_chunk=8)
    rig.submit(a_request("first", num_prompt=21, salt=1))
    assert rig.schedule_one() is not None
    rig.submit(a_request("second", num_prompt=21, salt=1))
    rig.finish()
    assert rig.events["second", 0][0].cached_tokens == 8


def test_a_burst_that_is_admitted_together_computes_its_beginning_once() -> None:
    rig = a_rig(num_stages=1, block_size=4, prefill_chunk=21)
    for i in range(3):
        rig.submit(a_request(f"r{i}", num_prompt=21, salt=1, max_tokens=1))
    held = rig.blocks.num_held
    fill(rig)
    rig.finish()
    assert sum(plan.num_tokens for plan in rig.pipeline.plans) < 2 * 21
    assert rig.scheduler.kv_usage == 0 < held
