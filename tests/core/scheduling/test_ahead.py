"""Steps that are sent before the step before them has drawn their tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ppserve.core.plan import StepPlan
from ppserve.core.request import FinishReason, SamplingParams, StopConditions
from tests.core.scheduling.rig import SchedulerRig, a_request, a_rig, fill
from tests.simulated_stage import expected_answer


def a_rig_ahead(**config: object) -> SchedulerRig:
    return a_rig(1, **{"runs_ahead": True, "prefix_cache": False, **config})  # type: ignore[arg-type]


def ids(plan: StepPlan) -> list[tuple[int, ...]]:
    return [slice_.token_ids for slice_ in plan.slices]


def test_the_next_step_is_sent_before_its_token_is_drawn() -> None:
    rig = a_rig_ahead()
    rig.submit(a_request("a", num_prompt=4, max_tokens=4))
    prompt, ahead = fill(rig)
    assert (len(prompt.slices[0].token_ids), ids(ahead)) == (4, [()])
    assert (ahead.phase, ahead.slices[0].start, ahead.slices[0].num_draws) == ("decode", 4, 1)
    assert fill(rig) == [], "one step at most is sent ahead"
    for _ in range(2):
        rig.commit_one()
        (ahead,) = fill(rig)
        assert ids(ahead) == [()]
    rig.commit_one()
    assert fill(rig) == [], "the last token is drawn by the step in flight"
    rig.finish()
    assert [len(plan.slices) for plan in rig.pipeline.plans] == [1] * 4
    assert set(rig.scheduler.num_draft_tokens.values()) == {0}, "it is no draft token"


def ends_early() -> tuple[Any, int]:
    """A request, and the place of the token that ends its answer."""
    for seed in range(100):
        request = a_request("ends", max_tokens=30, sampling=SamplingParams(seed), stop=StopConditions(30))
        answer = expected_answer(request)
        if answer.finish is FinishReason.EOS and 3 <= len(answer.token_ids) < 20:
            return request, len(answer.token_ids)
    raise AssertionError


def test_a_step_that_an_end_makes_useless_is_skipped_and_takes_no_slot() -> None:
    rig = a_rig_ahead()
    request, num_tokens = ends_early()
    rig.submit(request)
    for _ in range(num_tokens):
        events = rig.turn()
    assert events[-1].finish is FinishReason.EOS
    cancelled_steps = rig.scheduler.ahead.take_cancelled()
    assert len(cancelled_steps) == 1
    assert (rig.steps.num_in_flight, len(rig.scheduler.slots)) == (1, 0)
    rig.submit(a_request("next", max_tokens=3))
    (prompt,) = fill(rig)
    assert prompt.phase == "prefill", "it need not wait for the step that nobody needs"
    rig.pipeline.skipped |= set(cancelled_steps)
    assert rig.commit_one() == []
    rig.finish()


def test_all_steps_that_an_end_makes_useless_are_cancelled() -> None:
    """The one that the stage computes now, too: it may not have begun."""
    rig = a_rig_ahead()
    rig.submit(a_request("leaves", max_tokens=30))
    sent = fill(rig)
    rig.commit_one()
    sent += fill(rig)
    assert [plan.is_ahead for plan in sent] == [False, True, True]
    rig.tell(rig.request_queue.abort("leaves", FinishReason.CANCELLED))
    assert rig.scheduler.ahead.take_cancelled() == (sent[1].step_id, sent[2].step_id)
    assert not rig.scheduler.is_busy
    rig.drain()


@pytest.mark.parametrize("hears_in_time", [True, False])
def test_a_request_that_arrives_does_not_wait_for_a_step_that_was_sent_ahead(hears_in_time: bool) -> None:
    rig = a_rig_ahead()
    rig.skips = lambda: hears_in_time
    rig.submit(a_request("stream", max_tokens=30))
    rig.turn()
    (ahead,) = fill(rig)
    rig.submit(a_request("new_client", max_tokens=2))
    assert fill(rig) == [], "the step in flight is computed"
    assert rig.scheduler.ahead._cancelled == {ahead.step_id}
    rig.commit_one()
    (both,) = fill(rig)
    assert both.phase == "mixed"
    assert all(ids(both))
    rig.finish()


def test_nothing_is_sent_ahead_while_a_cancelled_step_is_in_flight() -> None:
    """The stage may have computed it. Then the tokens that it drew are not those of the step before."""
    rig = a_rig_ahead()
    rig.skips = lambda: False
    rig.submit(a_request("stream", max_tokens=30))
    fill(rig)
    rig.submit(a_request("leaves", max_tokens=2))
    rig.tell(rig.request_queue.abort("leaves", FinishReason.CANCELLED))
    assert len(rig.scheduler.ahead._cancelled) == 1
    assert fill(rig) == []
    rig.commit_one()
    assert [plan.is_ahead for plan in fill(rig)] == [False], "the cancelled step has not returned yet"
    rig.commit_one()
    assert [plan.is_ahead for plan in fill(rig)] == [True]
    rig.finish()


def test_a_cancelled_step_is_forgotten_with_its_epoch() -> None:
    """Nobody is told of it, and the next epoch sends ahead."""
    rig = a_rig_ahead()
    rig.submit(a_request("stream", max_tokens=30))
    fill(rig)
    rig.submit(a_request("other", max_tokens=30))
    assert len(rig.scheduler.ahead._cancelled) == 1
    rig.lose_stage()
    assert rig.scheduler.ahead.take_cancelled() == ()
    while rig.num_ahead == 1:
        rig.turn()
    assert rig.scheduler.slots.epoch == 1
    rig.finish()


def test_nothing_is_sent_ahead_where_something_else_should_come_first() -> None:
    rig = a_rig_ahead(max_num_seqs=2)
    rig.submit(a_request("a", max_tokens=30))
    rig.scheduler.slots.resize(2)
    assert len(fill(rig)) == 1, "two slots"
    rig.scheduler.slots.resize(1)
    assert [plan.is_ahead for plan in fill(rig)] == [True]
    rig.drain()

    rig.submit(a_request("long", num_prompt=900, max_tokens=4))
    assert len(fill(rig)) == 1, "the next chunk of the prompt"
    rig.finish()


def test_nothing_is_sent_ahead_of_a_place_that_becomes_free() -> None:
    rig = a_rig_ahead(max_num_seqs=2)
    for name, max_tokens in (("a", 2), ("b", 30), ("waits", 3)):
        rig.submit(a_request(name, max_tokens=max_tokens))
    _, ahead = fill(rig)
    assert len(ahead.slices) == 2
    rig.commit_one()
    assert fill(rig) == [], "a's last token is being drawn"
    rig.commit_one()
    assert fill(rig)[0].phase == "mixed"
    rig.finish()


def test_blocks_that_others_share_are_written_though_the_answer_has_ended() -> None:
    """A caller leaves when steps are in flight; one of them fills a block that was published."""
    rig = a_rig_ahead(block_size=1, prefix_cache=True)
    rig.submit(a_request("a", num_prompt=4, max_tokens=30))
    rig.turn()
    rig.turn()
    fill(rig)
    (sequence,) = rig.scheduler._running.values()
    assert sequence.num_published == len(sequence.token_ids)
    rig.tell(rig.request_queue.abort("a", FinishReason.CANCELLED))
    follows = tuple(sequence.token_ids)
    rig.submit(replace(a_request("b", max_tokens=5), prompt_ids=(*follows, 3)))
    rig.finish()
    (of_b,) = [events for (name, _), events in rig.events.items() if name == "b"]
    assert of_b[0].cached_tokens == len(follows)


def test_nothing_is_sent_ahead_while_a_suspect_is_computed_alone() -> None:
    """What is sent ahead could delay the others, who wait for the verdict."""
    rig = a_rig_ahead()
    rig.submit(a_request("suspect", max_tokens=30))
    rig.submit(a_request("other", max_tokens=30))
    for _ in range(2):
        fill(rig)
        rig.lose_stage()
    assert rig.request_queue.poison_isolation.lone is not None
    num_ahead = rig.num_ahead
    while rig.request_queue.poison_isolation.lone is not None:
        fill(rig)
        assert rig.num_ahead == num_ahead
        rig.commit_one()
    rig.finish()
