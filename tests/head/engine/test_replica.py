"""The replica: plans out, results in, slow stages and lost ones. Time and ranks are scripted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from ppserve import wire
from ppserve.core.cost_model import StepSize
from ppserve.core.ledger.steps import STEP_DEADLINE_NS
from ppserve.core.plan import RankResult, StepPlan, StepStamps, packed_biases, packed_ids
from ppserve.core.request import Request, SamplingParams, StopConditions
from ppserve.core.scheduling.slots import PROBE
from ppserve.errors import StagesLost
from tests.core.scheduling.rig import a_request
from tests.head.engine.replica_rig import MS, Rig, finished, formed
from tests.head.engine.scripted import SECOND


def test_a_step_is_committed_when_the_last_stage_reports_it_whoever_else_owes_it() -> None:
    rig = formed(microbatches=1)
    rig.submit("a", max_tokens=1)
    (plan,) = rig.refill()
    assert finished(rig.say(3, rig.result(plan, 1))) == ["a"]
    assert len(rig.replica.steps) > 0, "stage 0 has not reported: the server has work"
    assert rig.say(1, rig.result(plan, 0)) == []
    assert len(rig.replica.steps) == 0


def test_the_next_plan_is_sent_before_a_result_is_accounted_for_and_no_reading_lacks_it() -> None:
    rig = formed(microbatches=1)
    rig.submit("a")
    (plan,) = rig.refill()
    rig.compute(plan)
    reported = ("reported", plan.step_id, 1)
    assert reported not in rig.notes.called
    (following,) = rig.refill()
    assert rig.notes.called[-2:] == [reported, ("sent", following.step_id)]
    rig.compute(following)
    assert rig.replica.read().steps == (2, 2)
    (last,) = rig.refill()
    before = rig.replica.busy_s()
    rig.compute(last)
    assert [now - then for now, then in zip(rig.replica.busy_s(), before, strict=True)] == [0.001, 0.001]
    (last,) = rig.refill()
    rig.compute(last)
    rig.replica.note_demand(exists=False)
    assert rig.notes.called[-1] == ("reported", last.step_id, 1), "before the pipeline is idle"


# ---- results that count for nothing -------------------------------------------------------------------


def test_a_result_of_an_unknown_step_or_a_repeated_one_is_ignored() -> None:
    rig = formed(microbatches=1)
    rig.submit("a")
    (plan,) = rig.refill()
    unknown = StepPlan(plan.epoch, 99, 0, plan.slices)
    assert rig.say(3, rig.result(unknown, 1)) == []
    assert (
        rig.say(
            3, wire.Result(RankResult(epoch=0, step_id=plan.step_id, place=1, stamps=StepStamps(1, 1, 1, 1, 1, 1)))
        )
        == []
    )
    assert rig.say(3, rig.result(plan, 0)) == [], "of a stage that is not this rank's"
    assert rig.refill() == [], "the step is still in flight"
    (event,) = rig.say(3, rig.result(plan, 1))
    assert event.token_id == 3
    assert rig.say(3, rig.result(plan, 1)) == []
    assert [call for call in rig.notes.called if call[0] == "reported"] == [("reported", plan.step_id, 1)]
    assert rig.replica.read().steps == (0, 1)


def test_a_result_of_a_lost_epoch_is_ignored_and_its_tokens_are_computed_again() -> None:
    rig = formed(microbatches=1)
    rig.submit("a", max_tokens=1)
    (plan,) = rig.refill()
    rig.lose(1)
    assert rig.say(3, rig.result(plan, 1)) == []
    rig.submit("bb", max_tokens=1)
    assert rig.refill() == [], "no plan is sent while there is no epoch"
    rig.now_ns += SECOND
    rig.greet(1)
    assert rig.join() == [[], []]
    assert rig.say(3, rig.result(plan, 1)) == [], "still of the lost epoch"
    (again,) = rig.refill()
    assert (again.epoch, again.slices[0].token_ids) == (2, plan.slices[0].token_ids)
    assert finished(rig.compute(again)) == ["a", "bb"]


# ---- a stage that does not report ---------------------------------------------------------------------


@pytest.mark.parametrize(("reported", "stuck"), [((), 1), ((0,), 3), ((0, 1), 5)])
def test_the_rank_that_owes_a_step_past_its_deadline_is_dropped(reported: tuple[int, ...], stuck: int) -> None:
    rig = formed(3, microbatches=1)
    rig.submit("a")
    (plan,) = rig.refill()
    for stage in reported:
        rig.say(rig.ranks[stage], rig.result(plan, stage))
    deadline_s = STEP_DEADLINE_NS / SECOND if not reported else 10  # a step is known to take a millisecond then
    rig.wait(deadline_s - 1)
    rig.now_ns += 2 * SECOND  # no tick meanwhile, and no message was read: the deadline begins anew
    rig.replica.tick()
    assert rig.wait(deadline_s) == []
    assert rig.control.dropped == []
    rig.wait(1)
    assert set(rig.control.dropped) == {(stuck, "stuck")}


@pytest.mark.parametrize("owing", range(4))
def test_of_a_stages_tensor_ranks_the_one_that_owes_a_step_is_dropped(owing: int) -> None:
    rig = formed(2, num_tensor=2, microbatches=1)
    rig.submit("a")
    (plan,) = rig.refill()
    for place in range(4):
        if place != owing:
            rig.say(rig.ranks[place], rig.result(plan, place))
    rig.wait(STEP_DEADLINE_NS / SECOND + 2)
    assert set(rig.control.dropped) == {(rig.ranks[owing], "stuck")}
    rig.lose(rig.ranks[owing], "stuck")
    assert rig.replica._books._ranks._results == {}, "what the others reported is of no step any more"


def test_every_plan_has_its_draws_complete_in_each_epoch() -> None:
    """Stages know nothing about sequences."""
    rig = formed(microbatches=1)
    sampling = SamplingParams(logit_bias=((5, 1.0),), presence_penalty=0.5)
    rig.ask(replace(a_request("a", max_tokens=9), sampling=sampling))
    num_tokens = 0
    for _ in range(3):
        for _ in range(2):
            (plan,) = rig.refill()
            (slice_,) = plan.slices
            assert slice_.draw is not None
            assert slice_.draw.biases == packed_biases(sampling.logit_bias)
            assert slice_.draw.output_ids == packed_ids([3] * num_tokens)
            rig.compute(plan)
            num_tokens += 1
        rig.refill()
        rig.lose(3)
        rig.greet(3)
        rig.wait(1)
        rig.join()


def test_the_cost_of_a_step_is_what_its_stage_computed_not_what_it_waited_or_sent() -> None:
    rig = formed(microbatches=1)
    rig.submit("a", max_tokens=60)
    for _ in range(30):
        (plan,) = rig.refill()
        for stage, rank in enumerate(rig.ranks):
            rig.now_ns += 50 * MS
            at = rig.now_ns
            stamps = StepStamps(at - 40 * MS, at - 30 * MS, at - 20 * MS, at - 11 * MS, at - 10 * MS, at)
            result = rig.result(plan, stage).result
            rig.say(rank, wire.Result(structs.replace(result, stamps=stamps)))
    for cost in rig.replica._books.costs:
        assert cost.seconds(StepSize(1, 30, 1)) == pytest.approx(0.001, rel=0.05)


@pytest.mark.parametrize("pause_s", [0, 20])
def test_stages_that_end_while_the_head_stands_still_convict_nobody(pause_s: int) -> None:
    """They hear nothing of it. Without the pauses, as a control, the request in flight is convicted."""
    rig = formed(2)
    rig.submit("a")
    assert sum(rig.convicts(3, pause_s) for _ in range(5)) == (0 if pause_s else 1)


def test_who_was_in_flight_at_a_loss_without_a_failure_is_not_blamed_for_a_later_one() -> None:
    """A stage was silent, and is there again. It dies when nothing is in flight."""
    rig = formed()
    rig.submit("a")
    rig.refill()
    rig.wait(4, silent=(3,))
    for rank in rig.ranks:
        rig.say(rank, wire.Broken(1, "told"))
    rig.wait(1)
    rig.join()
    assert rig.replica.serves
    rig.lose(3)
    assert not rig.request_queue.poison_isolation.watches("a")


@pytest.mark.parametrize("other", [(1, "exit"), (0, "stuck")], ids=["rank", "cause"])
def test_who_is_alone_when_a_rank_ends_twice_in_the_same_way_is_convicted(other: tuple[int, str]) -> None:
    rig = formed(1, num_tensor=2)
    rig.submit("a")
    losses = [(0, "exit")] * 3 + [other, (0, "exit")]
    assert [rig.convicts(rig.ranks[tensor], 0, cause) for tensor, cause in losses] == [False] * 4 + [True]


# ---- starting and ending ------------------------------------------------------------------------------


@pytest.mark.parametrize(("draining", "patience_s"), [(False, 600), (True, 10)])
def test_a_lost_stage_is_waited_for_less_long_while_draining(draining: bool, patience_s: int) -> None:
    rig = formed()
    rig.submit("a")
    rig.refill()
    if draining:
        rig.replica.members.start_draining()
    assert rig.lose(3) == []
    assert rig.notes.called[-1] == ("died", 1, "exit")
    assert rig.wait(patience_s, silent=(3,)) == []
    with pytest.raises(StagesLost, match="did not come back in time"):
        rig.wait(1, silent=(3,))


# ---- slots --------------------------------------------------------------------------------------------


def run_stages(rig: Rig, num_steps: int, at_once: bool) -> None:
    """Both stages compute, a millisecond a step: at once, or one while the other waits."""
    queues: tuple[list[StepPlan], list[StepPlan]] = [], []
    for _ in range(num_steps):
        queues[0].extend(rig.refill())
        for stage in (1, 0):
            if not queues[stage]:
                continue
            rig.now_ns += MS // (1 + at_once)
            plan = queues[stage].pop(0)
            rig.say(rig.ranks[stage], rig.result(plan, stage, MS))
            if stage == 0:
                queues[1].append(plan)


@pytest.mark.parametrize(("at_once", "num_slots"), [(True, 2), (False, 3)])
def test_an_outage_is_no_wait_that_one_more_slot_would_save(at_once: bool, num_slots: int) -> None:
    """The control: stages that wait for each other have one more slot."""
    rig = formed()
    rig.submit("a", "bb", max_tokens=100)
    for _ in range(20):
        run_stages(rig, 8, at_once)
        rig.lose(3)
        rig.now_ns += 100 * SECOND
        rig.replica.tick()
        rig.greet(3)
        rig.wait(1)
        rig.join()
    run_stages(rig, 4, at_once)
    assert rig.replica.read().microbatches == num_slots


# ---- the ledger ---------------------------------------------------------------------------------------


def test_time_without_demand_is_idle_and_time_without_a_stage_is_host() -> None:
    rig = formed(microbatches=1)
    rig.now_ns += 5 * SECOND  # idle
    rig.submit("a", max_tokens=1)
    (plan,) = rig.refill()
    rig.now_ns += MS
    rig.lose(1)
    rig.now_ns += 3 * SECOND  # down, and a request is open
    rig.greet(1)
    rig.join()
    (again,) = rig.refill()
    rig.compute(again)
    rig.replica.note_demand(exists=False)
    rig.now_ns += 7 * SECOND  # idle again
    for times in rig.times():
        assert times.wall_ns == rig.now_ns - SECOND
        assert times.idle_ns == 12 * SECOND
        assert times.busy_ns == {"prefill": MS, "decode": 0, "mixed": 0}
        assert times.bubble_ns["host"] >= 3 * SECOND
        assert times.demand_ns == 3 * SECOND + 3 * MS
    assert plan.epoch < again.epoch


# ---- losses in a row, and draft tokens --------------------------------------------------------------------


def losses_borne(num_losses: int, *, asks: bool = True, brings_token_at: int | None = None) -> int | None:
    """How many losses the server bears while each request kills the last stage, though that computes a probe.
    asks: there is always a request."""
    rig = formed()
    for number in range(num_losses):
        if asks:
            rig.submit("a" * (number + 1))
        for plan in rig.refill():
            if plan.slices == (PROBE,):
                rig.compute(plan)
                (plan,) = rig.refill()[:1]
            if number == brings_token_at:
                rig.compute(plan)
        try:
            rig.lose(3)
        except StagesLost:
            return number + 1
        rig.greet(3)
        rig.wait(1)
        rig.join()
    return None


@pytest.mark.parametrize(
    ("options", "ends_after"), [({}, 64), ({"brings_token_at": 50}, None), ({"asks": False}, None)]
)
def test_only_losses_in_a_row_with_a_request_and_without_a_token_end_the_server(
    options: dict[str, Any], ends_after: int | None
) -> None:
    assert losses_borne(100, **options) == ends_after


@pytest.mark.parametrize(("reason", "num_rows"), [(None, 2), ("rows differ", 1)])
def test_no_draft_tokens_where_the_self_test_failed(
    reason: str | None, num_rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(speculate=1)
    rig.form(reason)
    rig.ask(Request("r", (3,) * 6, StopConditions(6, ignore_eos=True), SamplingParams()))
    (prompt,) = rig.refill()
    rig.compute(prompt)  # it draws token 3
    (plan,) = rig.refill()
    assert plan.num_tokens == num_rows
    assert ("rows differ" in caplog.text) == bool(reason)
