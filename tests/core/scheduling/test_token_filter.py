"""A request's token filter: its masks reach every draw, also of draft tokens and after losses.

The walks mix all of it with everything else; here is what they would not show."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from ppserve.core.plan import StepPlan
from ppserve.core.request import SamplingParams
from ppserve.core.scheduling.request_queue import RequestQueue
from ppserve.core.scheduling.token_filter import ImmediateMasks, is_allowed, packed_mask
from tests.core.scheduling.rig import Oracle, SchedulerRig, a_request, a_rig, fill
from tests.simulated_stage import VOCAB_SIZE, MadeUpFilter, expected_answer


def masks(plan: StepPlan) -> list[bytes | None]:
    return [draw.mask for slice_ in plan.slices for _, draw in slice_.draws]


def test_a_mask_has_a_bit_for_each_id_and_forbids_what_is_beyond_its_end() -> None:
    mask = packed_mask([0, 9, 15], 17)
    assert mask == b"\x01\x82\x00"
    assert [i for i in range(40) if is_allowed(mask, i)] == [0, 9, 15]
    assert is_allowed(None, 10**9)


def test_a_filter_changes_answers_and_nobody_elses() -> None:
    rig, token_filter = a_rig(num_stages=2), MadeUpFilter(3)
    asked = a_request("filtered", max_tokens=12, num_sequences=3)
    rig.submit(asked, token_filter)
    rig.submit(a_request("other", max_tokens=12))
    found = {mask for plan in fill(rig) for mask in masks(plan)}
    assert found == {None, token_filter.allowed(())}
    rig.finish()
    for index in range(3):
        assert expected_answer(asked, index) != expected_answer(asked, index, token_filter=token_filter)


def test_each_token_is_filtered_by_those_before_it_after_a_loss_too() -> None:
    rig, token_filter = a_rig(num_stages=2, prefill_chunk=4, speculate=0), MadeUpFilter(5)
    rig.submit(a_request("r", num_prompt=11, max_tokens=9), token_filter)
    output: list[int] = []
    while rig.has_work:
        for plan in fill(rig):
            draws = [draw for slice_ in plan.slices for _, draw in slice_.draws]
            assert [draw.mask for draw in draws] == [token_filter.allowed(output)] * len(draws)
        if len(output) in (2, 5) and rig.scheduler.slots.epoch < (1 if len(output) == 2 else 2):
            rig.lose_stage()
            continue
        output += [event.token_id for event in rig.commit_one() if event.token_id is not None]
    assert rig.scheduler.slots.epoch == 2
    rig.finish()


@pytest.mark.parametrize("cut", [1, 4])
def test_a_resumed_answer_is_filtered_by_the_tokens_that_the_caller_holds(cut: int) -> None:
    rig, token_filter = a_rig(num_stages=1), MadeUpFilter(7)
    request = a_request("r", max_tokens=9, sampling=SamplingParams(repetition_penalty=1.2))
    held = expected_answer(request, token_filter=token_filter).token_ids[:cut]
    rig.submit(replace(request, resume_index=0, resume_ids=held), token_filter)
    (plan,) = fill(rig)
    assert masks(plan) == [token_filter.allowed(held)]
    rig.finish()


@dataclass(frozen=True)
class OneWay(MadeUpFilter):
    """Only one id may follow."""

    def ids(self, output_ids: object) -> list[int]:
        return super().ids(output_ids)[:1]  # type: ignore[arg-type]

    def allowed(self, output_ids: object) -> bytes:
        return packed_mask(self.ids(output_ids), VOCAB_SIZE)


def drafting(rate: float) -> SchedulerRig:
    config = a_rig(num_stages=2, speculate=4).config
    return SchedulerRig(config, 400, new_drafter=lambda sequence: Oracle(sequence, rate))


def test_a_draft_token_that_the_filter_forbids_is_none() -> None:
    rig = drafting(rate=0.0)
    rig.submit(a_request("r", max_tokens=20), OneWay())
    rig.finish()
    assert rig.num_draft_tokens == 0


def test_each_draft_token_has_a_mask_of_its_own() -> None:
    rig, token_filter, several = drafting(rate=0.8), MadeUpFilter(2), 0
    request = a_request("r", max_tokens=40, sampling=SamplingParams(4))
    rig.submit(request, token_filter)
    answer = expected_answer(request, token_filter=token_filter).token_ids
    while rig.has_work:
        for plan in fill(rig):
            several += len(set(masks(plan))) > 1
            for slice_ in plan.slices:
                for position, draw in slice_.draws:
                    num_known = slice_.end - slice_.num_draft_tokens - len(request.prompt_ids)
                    drafted = slice_.token_ids[len(slice_.token_ids) - slice_.num_draft_tokens :]
                    output = (*answer[:num_known], *drafted)[: position - len(request.prompt_ids)]
                    assert draw.mask == token_filter.allowed(output)
        rig.commit_one()
    assert several > 3
    assert rig.scheduler.num_draft_tokens["accepted"] > 10
    rig.finish()


def test_a_step_is_sent_ahead_of_its_masks_and_gets_them_once_the_token_before_is_known() -> None:
    rig, token_filter = a_rig(1, runs_ahead=True, prefix_cache=False), MadeUpFilter(1)
    request = a_request("filtered", max_tokens=10)
    rig.submit(a_request("plain", max_tokens=40))
    rig.submit(request, token_filter)
    answer = expected_answer(request, token_filter=token_filter).token_ids
    filtered = rig.request_queue.groups["filtered"].sequences[0]
    while filtered.is_live:
        assert all(masks(plan) == [None, None] for plan in fill(rig) if plan.awaits_masks)
        rig.commit_one()
    rig.finish()
    num_masked = 0
    for plan in rig.pipeline.plans:
        for slice_ in plan.slices if plan.is_ahead else ():
            for position, draw in slice_.draws if slice_.sequence_id == filtered.id else ():
                assert draw.mask == token_filter.allowed(answer[: position - len(request.prompt_ids)])
                num_masked += 1
    assert num_masked >= 8


class SlowMasks(ImmediateMasks):
    """A source whose last mask took long."""

    is_slow = True


def test_no_step_is_sent_ahead_of_masks_that_take_long() -> None:
    config = a_rig(1, runs_ahead=True, prefix_cache=False).config
    rig = SchedulerRig(config, 400, request_queue=RequestQueue(SlowMasks))
    rig.submit(a_request("plain", max_tokens=40))
    rig.submit(a_request("filtered", max_tokens=10), MadeUpFilter(1))
    filtered = rig.request_queue.groups["filtered"].sequences[0]
    while filtered.is_live:
        # Once its last token is being drawn, the other one goes on without it.
        assert not any(plan.is_ahead for plan in fill(rig)) or filtered.num_free_positions == 0
        rig.commit_one()
    rig.finish()
    assert rig.num_ahead > 10, "it is, once the filtered answer has ended"
