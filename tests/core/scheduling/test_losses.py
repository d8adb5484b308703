"""Losing a stage: no request's tokens change, and only a request that kills stages fails."""

from __future__ import annotations

import pytest

from ppserve.core.request import FinishReason, OutputOptions
from ppserve.core.scheduling.poison_isolation import PoisonIsolation
from ppserve.core.scheduling.slots import PROBE
from ppserve.errors import RequestFailed
from tests.core.scheduling.rig import SchedulerRig, a_request, a_rig, fill


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


def test_a_prompt_that_was_scored_in_part_is_scored_once() -> None:
    rig = a_rig(num_stages=1, prefill_chunk=4)
    rig.submit(a_request("r", num_prompt=12, output=OutputOptions(prompt_logprobs=0)))
    for _ in range(2):
        rig.turn()
    scored = [len(slice_.targets) for plan in rig.pipeline.plans for slice_ in plan.slices]
    assert scored == [4, 4], "in part: eight of the eleven tokens that have one before them"
    rig.lose_stage()
    rig.finish()


# ---- poison requests: the count of losses ----


def after(*losses: tuple[str, set[int]]) -> tuple[PoisonIsolation, list[str | None]]:
    """What is known after losses at which these requests, a letter each, were in flight and these ranks failed;
    and who was convicted at each."""
    isolation = PoisonIsolation()
    return isolation, [isolation.record_loss(set(in_flight), failed) for in_flight, failed in losses]


def test_each_suspect_has_its_own_count() -> None:
    isolation, _ = after(("abc", {0}), ("abc", {0}))
    assert isolation.lone == "a"
    isolation.clear("a")
    assert [isolation.record_loss({"b"}, {0}) for _ in range(2)] == [None, "b"], "one loss alone may be chance"
    assert isolation.record_loss({"c"}, {0}) is None
    isolation.clear("c")
    isolation.record_loss({"c"}, {0})
    assert isolation.lone is None, "one that is cleared is counted anew"


@pytest.mark.parametrize(
    ("losses", "lone"),
    [
        ([("a", {0}), ("a", {0}), ("", {0})], "a"),  # nothing ran
        ([("a", set())] * 9, None),  # no rank failed
        ([("a", {0})] * 2 + [("a", set())] * 9, "a"),
    ],
)
def test_a_loss_without_a_request_or_a_failed_rank_blames_nobody(
    losses: list[tuple[str, set[int]]], lone: str | None
) -> None:
    isolation, convicted = after(*losses)
    assert set(convicted) == {None}
    assert isolation.lone == lone


@pytest.mark.parametrize("alone", [[{0}, {1}, {2}, {3}], [{0, 1}, {2}, {1}], [{0}, {0}]])
def test_other_ranks_failing_in_turn_are_chance_for_longer(alone: list[set[int]]) -> None:
    _, convicted = after(("a", {0}), ("a", {1}), *(("a", failed) for failed in alone))
    assert convicted == [None] * (len(alone) + 1) + ["a"]


def test_a_request_may_be_blamed_for_four_losses_in_a_row_that_it_did_not_cause() -> None:
    """A known limit, found by a simulated history: a killed stage and three that hang, two of them at the same
    place, all before the request's first token. Nothing tells this from a request that kills stages."""
    killed, hung, hung_elsewhere = {(0, 1, "exit")}, {(0, 0, "stuck")}, {(1, 0, "stuck")}
    isolation = PoisonIsolation()
    losses = [({"a", "b"}, killed), ({"a", "b"}, hung), ({"a"}, hung_elsewhere), ({"a"}, hung_elsewhere)]
    convicted = [isolation.record_loss(in_flight, failed) for in_flight, failed in losses]
    assert convicted == [None, None, None, "a"]


def test_who_kills_beside_a_suspect_that_is_stuck_elsewhere_becomes_one_too() -> None:
    isolation, convicted = after(("s", {0}), ("s", {0}), ("k", {0}), ("k", {0}))
    assert set(convicted) == {None}
    assert "k" in isolation.suspects, "it would be computed again without end"
    assert isolation.lone == "s"
    isolation.clear("s")
    assert [isolation.record_loss({"k"}, {0}) for _ in range(2)] == [None, "k"]


# ---- poison requests: a scheduler that loses stages ----


def lose_twice(rig: SchedulerRig) -> None:
    for _ in range(2):
        fill(rig)
        rig.lose_stage()


def lone_of(rig: SchedulerRig) -> str | None:
    return rig.request_queue.poison_isolation.lone


def run_with_poison(rig: SchedulerRig, poison: str, at_token: int, index: int = 0) -> int:
    """Loses a stage whenever a step would compute token number `at_token` of an answer of `poison`; counts
    losses."""
    losses = 0
    ids = {s.id for s in rig.request_queue.groups[poison].sequences if s.index == index}
    deadly = len(rig.requests[poison].prompt_ids) + at_token
    while rig.has_work:
        fill(rig)
        step = rig.pipeline._queue[0]
        if any(s.sequence_id in ids and s.end >= deadly for s in step.slices):
            rig.lose_stage()
            losses += 1
            assert losses < 10
        else:
            rig.commit_one()
        rig.check()
    return losses


@pytest.mark.parametrize("at_token", [0, 3])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_only_the_request_that_kills_stages_fails(num_stages: int, at_token: int) -> None:
    rig = a_rig(num_stages, num_blocks=2000)
    for i in range(16):
        rig.submit(a_request(f"r{i}", num_prompt=5 + i, max_tokens=12))
    losses = run_with_poison(rig, "r7", at_token)
    assert losses == 4, "with others, replayed with others, replayed alone twice"
    (poisoned,) = [events for (name, _), events in rig.events.items() if name == "r7"]
    assert isinstance(poisoned[-1].error, RequestFailed)
    assert len([e for e in poisoned if e.token_id is not None]) == at_token
    del rig.requests["r7"]
    rig.check_answers()


def test_tokens_of_one_answer_do_not_clear_a_request_whose_other_answer_kills() -> None:
    rig = a_rig(num_stages=1, prefill_chunk=14, prefix_cache=False)
    rig.submit(a_request("two", num_prompt=9, num_sequences=2, max_tokens=30))
    rig.submit(a_request("other", num_prompt=9))
    assert run_with_poison(rig, "two", at_token=0, index=1) == 4
    assert [event.token_id is not None for event in rig.events["two", 0]] == [True] * 4 + [False], "one an epoch"
    assert [type(event.error) for event in rig.events["two", 1]] == [RequestFailed]
    del rig.requests["two"]
    rig.check_answers()


def test_a_token_counts_since_the_latest_loss() -> None:
    """Both answers got one after a loss that nobody caused. Then the second kills at its third."""
    rig = a_rig(num_stages=1, prefill_chunk=60, prefix_cache=False)
    rig.submit(a_request("two", num_prompt=9, num_sequences=2, max_tokens=30))
    fill(rig)
    rig.lose_stage()
    assert run_with_poison(rig, "two", at_token=2, index=1) == 4
    assert [event.token_id is not None for event in rig.events["two", 1]] == [True, True, False]


def prove(rig: SchedulerRig) -> None:
    """The epoch before computed nothing, so this one begins with a probe."""
    assert [plan.slices for plan in fill(rig)] == [(PROBE,)]
    assert rig.commit_one() == []


def test_an_outage_before_a_probe_is_no_time_of_computing() -> None:
    rig = a_rig(num_stages=2)
    rig.submit(a_request("before", max_tokens=20))
    while rig.has_work:
        fill(rig)
        rig.now += 0.1
        rig.commit_one()
    throughput = rig.request_queue._throughput
    before_s = throughput.seconds_for(100)
    assert before_s is not None
    rig.submit(a_request("r"))
    fill(rig)
    for _ in range(2):
        rig.lose_stage()
        rig.now += 15.0
    prove(rig)
    after_s = throughput.seconds_for(100)
    assert after_s is not None
    assert after_s < 2 * before_s
    rig.finish()


def test_of_stages_that_die_of_a_probe_nobody_is_to_blame() -> None:
    rig = a_rig(num_stages=2)
    rig.submit(a_request("r0"))
    lose_twice(rig)
    for _ in range(20):
        assert [plan.slices for plan in fill(rig)] == [(PROBE,)]
        rig.lose_stage()
    prove(rig)
    rig.finish()


def test_suspects_run_alone_and_everybody_else_waits() -> None:
    rig = a_rig(num_stages=4, prefill_chunk=4)
    for i in range(3):
        rig.submit(a_request(f"r{i}", num_prompt=9))
    lose_twice(rig)
    rig.submit(a_request("new_client"))
    prove(rig)
    assert rig.request_queue.num_waiting == 3, "nobody else is admitted meanwhile"
    in_turn = []
    while lone_of(rig) is not None:
        in_turn += [slice_.sequence_id for plan in fill(rig) for slice_ in plan.slices]
        rig.commit_one()
    assert in_turn == sorted(in_turn)
    assert set(in_turn) == {0, 1}
    rig.finish()


def test_the_next_suspect_waits_until_the_last_step_of_the_one_before_is_back() -> None:
    rig = a_rig(num_stages=2, prefill_chunk=9, prefix_cache=False)
    rig.submit(a_request("first", num_prompt=9, num_sequences=2))
    rig.submit(a_request("second", num_prompt=9))
    rig.scheduler.slots.resize(3)
    lose_twice(rig)
    assert lone_of(rig) == "first"
    prove(rig)
    while rig.has_work:
        fill(rig)
        in_flight = {s.sequence_id for plan in rig.pipeline._queue for s in plan.slices}
        if lone_of(rig) is not None:
            assert in_flight <= {0, 1} or in_flight == {2}, "two requests at once"
        rig.commit_one()
    rig.check_answers()


def test_a_suspect_that_is_cancelled_lets_the_others_go_on() -> None:
    rig = a_rig(num_stages=2)
    for i in range(2):
        rig.submit(a_request(f"r{i}", num_prompt=9))
    lose_twice(rig)
    rig.tell(rig.request_queue.abort("r0", FinishReason.CANCELLED))
    rig.finish()


def test_the_controls_a_missing_token_and_a_replay_that_forgets_the_loss_are_noticed() -> None:
    """If keys are lost and the scheduler is not told, answers must be wrong."""
    rig = a_rig(num_stages=1)
    rig.submit(a_request("r"))
    rig.drain()
    del rig.events["r", 0][2]
    with pytest.raises(AssertionError):
        rig.check_answers()
    rig.submit(a_request("lost", max_tokens=20))
    rig.turn()
    rig.pipeline.lose()
    with pytest.raises(KeyError):
        rig.drain()
