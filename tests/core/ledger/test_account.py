import itertools
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ppserve.core.ledger.account import Settled, StageTimes
from ppserve.core.ledger.causes import BUSY, CAUSES, HOST, IMBALANCE, TRANSFER, RecentDelays, Span
from ppserve.core.plan import StepResult, StepStamps
from tests.core.artificial import ArtificialPipeline, account_of, plan, report, send

S = 1_000_000  # one stage's time for a step, ns


def account_for(pipeline: ArtificialPipeline, num_steps: int) -> tuple[StageTimes, ...]:
    account = account_of(len(pipeline.compute_ns))
    end = pipeline.run(num_steps).feed(account)
    times = account.settled()
    assert {t.wall_ns for t in times} == {end}
    return times


def bubbles(times: StageTimes) -> dict[str, int]:
    return {cause: ns for cause, ns in times.bubble_ns.items() if ns}


# ---- each cause alone, under its own name ---------------------------------------------------------------


@pytest.mark.parametrize("num_stages", range(2, 9))
@pytest.mark.parametrize("num_microbatches", range(1, 17))
def test_fill_drain_of_m_microbatches(num_stages, num_microbatches):
    pipeline = ArtificialPipeline((S,) * num_stages, slots=num_stages)
    for times in account_for(pipeline, num_microbatches):
        if num_microbatches >= num_stages:
            wall = (num_microbatches + num_stages - 1) * S
            assert times.wall_ns == wall
            assert times.bubble_ns["fill_drain"] * (num_microbatches + num_stages - 1) == wall * (num_stages - 1)
        assert set(bubbles(times)) == {"fill_drain"}


def steady(pipeline: ArtificialPipeline, num_steps: int = 40) -> list[dict[str, int]]:
    """Bubbles per stage between an early and a late moment of a long run."""
    marks: list[list[Settled]] = [[] for _ in pipeline.compute_ns]
    account = account_of(len(pipeline.compute_ns), observer=lambda settled: marks[settled.stage].append(settled))
    pipeline.run(num_steps).feed(account)
    result = []
    for spans in marks:
        total = dict.fromkeys(CAUSES, 0)
        for s in spans:
            if s.step_id in range(num_steps // 4, num_steps * 3 // 4) and s.span.kind in CAUSES:
                total[s.span.kind] += s.span.end - s.span.start
        result.append({k: v for k, v in total.items() if v})
    return result


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_equal_stages_with_enough_sequences_have_no_bubble(num_stages):
    equal = (S,) * num_stages
    assert steady(ArtificialPipeline(equal, slots=num_stages)) == [{}] * num_stages
    hidden = ArtificialPipeline(equal, slots=num_stages + 1, token_return_ns=S)
    assert steady(hidden) == [{}] * num_stages, "one slot more hides the token's return"


@pytest.mark.parametrize(
    ("compute", "waits"),
    [
        ((S, 3 * S), [2 * S, 0]),
        ((3 * S, S), [0, 2 * S]),
        ((3 * S, S, S), [0, 2 * S, 2 * S]),
        ((S, S, 3 * S), [2 * S, 2 * S, 0]),
        ((S, 3 * S, 2 * S, S), [2 * S, 0, S, 2 * S]),
    ],
)
def test_imbalance(compute, waits):
    pipeline = ArtificialPipeline(compute, slots=len(compute))
    assert steady(pipeline) == [{"imbalance": 20 * w} if w else {} for w in waits]


@pytest.mark.parametrize(
    ("cause", "delay"),
    [
        ("transfer", {"transfer_ns": S // 4}),
        ("transfer", {"sending_ns": S // 4}),
        ("token_return", {"token_return_ns": S // 4}),
        ("host", {"schedule_ns": S // 4}),
        ("host", {"prepare_ns": S // 4}),
    ],
)
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_delay_in_a_full_pipeline_of_equal_stages_has_one_name(cause, delay, num_stages):
    stages = steady(ArtificialPipeline((S,) * num_stages, slots=num_stages, **delay))
    assert [set(bubble) for bubble in stages] == [{cause}] * num_stages


def test_one_token_on_its_way_is_token_return_on_every_stage():
    pipeline = ArtificialPipeline((S, S), slots=1, token_return_ns=S, transfer_ns=S, prepare_ns=S)
    for bubble in steady(pipeline, 40):
        assert bubble == {"fill_drain": 20 * S, "transfer": 20 * S, "token_return": 20 * S, "host": 40 * S}


# ---- the sum --------------------------------------------------------------------------------------------

durations = st.integers(0, 5)


@given(
    compute=st.lists(st.integers(1, 6), min_size=1, max_size=5).map(tuple),
    slots=st.integers(1, 7),
    num_steps=st.integers(1, 25),
    delays=st.tuples(durations, durations, durations, durations, durations),
    seed=st.integers(0, 1000),
)
@example(compute=(1,), slots=1, num_steps=2, delays=(0, 0, 0, 0, 1), seed=2)
def test_scrapes_at_any_moment_sum_to_the_wall_and_never_decrease(compute, slots, num_steps, delays, seed):
    pipeline = ArtificialPipeline(compute, slots, *delays, start_ns=7).run(num_steps)
    account = account_of(len(compute))
    account.demand_began(7)
    rng = random.Random(seed)
    before = account.snapshot(3)
    open_ns = 0  # the longest stretch whose kind any scrape had to estimate
    for event in delayed(pipeline.events(), rng, len(compute) - 1):
        pipeline.play(account, event)
        now = event[0] + rng.randrange(4)
        after = account.snapshot(now)
        for old, new in zip(before, after, strict=True):
            assert new.wall_ns == max(now, old.wall_ns)
            delta = new.since(old)
            assert min(*delta.busy_ns.values(), *delta.bubble_ns.values(), delta.idle_ns) >= 0
        open_ns = max(open_ns, *(now - times.wall_ns for times in account.settled()))
        before = after
    end = pipeline.returned[-1] + 100
    account.demand_ended(end)
    for stage, times in enumerate(account.settled()):
        assert times.wall_ns == end
        assert times.busy_ns["decode"] == num_steps * compute[stage]
        assert times.idle_ns == 7
    for scraped, true in zip(account.snapshot(end), account.settled(), strict=True):
        error = scraped.since(true)
        assert max(*error.busy_ns.values(), *error.bubble_ns.values(), error.idle_ns) <= open_ns


def delayed(events, rng, last):
    """Results of stages before the last reach the head late: in order for each stage, in any order between
    them."""
    late = dict.fromkeys(range(last), 0)
    keyed = []
    for at, order, what, k, i in events:
        if what == "reported" and i < last:
            late[i] = max(late[i], at + rng.randrange(12))
            keyed.append((late[i], 2, what, k, i))
        else:
            keyed.append((at, order, what, k, i))
    return sorted(keyed, key=lambda e: (*e[:2], e[3], e[4]))


def test_spans_tile_each_stage():
    spans: dict[int, list[Settled]] = {0: [], 1: [], 2: []}
    account = account_of(3, observer=lambda s: spans[s.stage].append(s))
    end = ArtificialPipeline((3, 5, 4), 2, 1, 1, 1, 1, 1, start_ns=50).run(30).feed(account)
    for of_stage in spans.values():
        assert of_stage[0].span.start == 0
        assert of_stage[-1].span.end == end
        assert all(a.span.end == b.span.start for a, b in itertools.pairwise(of_stage))
        assert all(s.span.end > s.span.start for s in of_stage)
        assert [s.step_id for s in of_stage if s.span.kind in BUSY] == list(range(30))


def test_nothing_is_kept_about_settled_steps():
    account = account_of(2)
    ArtificialPipeline((S, S), 2).run(500).feed(account)
    assert not len(account.steps)
    assert not account._unsettled
    assert not any(t.queue for t in account._timelines)
    step, length = account._last_returned, 0
    while step:
        step, length = step.trigger, length + 1
    assert length == 1


# ---- idle, losses -----------------------------------------------------------------------------------------


def test_a_lost_stage_is_host_until_the_pipeline_has_formed():
    account = account_of(2)
    account.demand_began(0)
    for k in range(2):
        send(account, plan(k), 0, 0)
    stamps = StepStamps(0, 0, 0, 0, 10, 10)
    report(account, StepResult(epoch=1, step_id=0, stage=0, stamps=stamps), 10)
    account.steps.lost()
    account.stage_lost(30)
    account.stage_lost(31)
    assert [t.bubble_ns["host"] for t in account.snapshot(100)] == [90, 100]
    account.formed(130)
    account.formed(131)
    late = StepStamps(0, 10, 10, 10, 20, 20)
    report(
        account, StepResult(epoch=1, step_id=1, stage=0, stamps=late), 140
    )  # of the old epoch: says nothing any more
    ArtificialPipeline((5, 5), 2, start_ns=130).run(2).feed(account, first_step_id=2)
    first, second = account.settled()
    assert (first.busy_ns["decode"], bubbles(first)) == (20, {"host": 120, "fill_drain": 5})
    assert (second.busy_ns["decode"], bubbles(second)) == (10, {"host": 130, "fill_drain": 5})
    assert first.wall_ns == second.wall_ns == 145


def test_a_pipeline_that_is_down_costs_nothing_until_there_is_demand():
    account = account_of(1)
    account.stage_lost(10)
    assert account.snapshot(30)[0] == StageTimes(dict.fromkeys(BUSY, 0), dict.fromkeys(CAUSES, 0), 30)
    account.demand_began(30)
    account.formed(50)
    account.demand_ended(50)
    assert bubbles(account.settled()[0]) == {"host": 20}


def test_stamps_that_contradict_each_other_still_sum_to_the_wall():
    """Clocks of hosts agree only to microseconds, so a stamp may be earlier than its cause, or later than now."""
    account = account_of(2)
    send(account, plan(0), 100, 90)
    for stage, at in ((1, 40), (0, 300)):
        stamps = StepStamps(at, at, at, at, at + 20, at + 10)
        report(account, StepResult(epoch=1, step_id=0, stage=stage, stamps=stamps), 130)
    assert {t.wall_ns for t in account.snapshot(150)} == {150}
    account.demand_ended(400)
    assert {t.wall_ns for t in account.snapshot(400)} == {400}
    assert {t.wall_ns for t in account.settled()} == {400}


# ---- what is not settled yet, and what was long ago --------------------------------------------------------


@pytest.mark.parametrize(("num_sent", "waiting"), [(1, "fill_drain"), (2, "imbalance")])
def test_time_that_is_not_settled_is_shown_under_its_probable_name(num_sent: int, waiting: str) -> None:
    """Demand since 0, plans sent at 6. Stage 0 is shown to compute from then on, stage 1 from when stage 0 had
    computed, once it has reported that."""
    account = account_of(2)
    account.demand_began(0)
    for step_id in range(num_sent):
        send(account, plan(step_id), 6, 5)
    first, second = account.snapshot(10)
    assert (bubbles(first), first.busy_ns["decode"]) == ({waiting: 6}, 4)
    assert (bubbles(second), second.busy_ns["decode"]) == ({waiting: 10}, 0)
    report(account, StepResult(epoch=1, step_id=0, stage=0, stamps=StepStamps(6, 6, 6, 6, 12, 12)), 13)
    _, second = account.snapshot(15)
    assert (bubbles(second), second.busy_ns["decode"]) == ({waiting: 12}, 3)


def test_waits_of_tensor_ranks_for_each_other_are_gather() -> None:
    account = account_of(1)
    send(account, plan(0), 0, 0)
    report(
        account, StepResult(epoch=1, step_id=0, stage=0, stamps=StepStamps(0, 0, 0, 0, 10, 10), gathered_ns=4), 10
    )
    (times,) = account.settled()
    assert (bubbles(times), times.busy_ns["decode"]) == ({"gather": 4}, 6)


def test_a_stage_that_is_not_ready_for_hidden_states_waits_for_its_host() -> None:
    """They have been computed at 10. Stage 1 is ready for them at 15, has them at 17, and begins at 18."""
    account = account_of(2)
    send(account, plan(0), 0, 0)
    report(account, StepResult(epoch=1, step_id=0, stage=0, stamps=StepStamps(0, 0, 0, 0, 10, 10)), 11)
    report(account, StepResult(epoch=1, step_id=0, stage=1, stamps=StepStamps(0, 15, 17, 18, 20, 20)), 21)
    _, second = account.settled()
    assert bubbles(second) == {"fill_drain": 10, "host": 5 + 1, "transfer": 2}


def test_after_the_last_step_a_wait_has_the_causes_of_its_way_back() -> None:
    """Stage 0 has sent it at 12, stage 1 has computed it at 20, the head has it at 23, and demand ends at 30."""
    account = account_of(2)
    send(account, plan(0), 0, 0)
    report(account, StepResult(epoch=1, step_id=0, stage=0, stamps=StepStamps(0, 0, 0, 0, 10, 12)), 13)
    report(account, StepResult(epoch=1, step_id=0, stage=1, stamps=StepStamps(0, 0, 12, 12, 20, 20)), 23)
    account.demand_ended(30)
    first, second = account.settled()
    assert bubbles(first) == {"transfer": 2, "fill_drain": 8, "token_return": 3, "host": 7}
    assert bubbles(second) == {"fill_drain": 10, "transfer": 2, "token_return": 3, "host": 7}


def attributed(recent: RecentDelays) -> dict[str, int]:
    spans = recent.attribute((Span(100, 600, IMBALANCE), Span(600, 1100, HOST)))
    assert [spans[0].start, *(span.end for span in spans)] == [*(span.start for span in spans), 1100]
    return {span.kind: span.end - span.start for span in spans}


def test_a_delay_that_goes_round_takes_the_causes_of_late_and_old_ones_fade() -> None:
    recent = RecentDelays(8)
    assert attributed(recent) == {IMBALANCE: 500, HOST: 500}, "nothing is known better"
    recent.add([Span(0, 8000, HOST), Span(0, 10**9, "fill_drain")])
    assert attributed(recent) == {HOST: 1000}
    recent.fade()
    recent.add([Span(0, 7000, TRANSFER)])
    assert attributed(recent) == {TRANSFER: 500, HOST: 500}, "a step has taken an eighth"
    for _ in range(80):
        recent.fade()
        recent.add([Span(0, 1000, IMBALANCE)])
    assert attributed(recent)[IMBALANCE] > 990


def waits_in_turn(num_stages: int, *pipelines: ArtificialPipeline) -> list[list[dict[str, int]]]:
    """The bubbles of stage 0 while one pipeline follows the other, for every 40 of the steps of each."""
    found: list[list[dict[str, int]]] = []
    spans: list[Settled] = []
    account = account_of(num_stages, observer=lambda settled: spans.append(settled) if not settled.stage else None)
    first_step_id = 0
    for pipeline in pipelines:
        spans.clear()
        pipeline.start_ns = pipelines[len(found) - 1].returned[-1] if found else 0
        pipeline.run(120).feed(account, first_step_id)
        windows = [dict.fromkeys(CAUSES, 0) for _ in range(3)]
        for settled in spans:
            if settled.step_id is not None and settled.span.kind in CAUSES:
                window = windows[(settled.step_id - first_step_id) // 40]
                window[settled.span.kind] += settled.span.end - settled.span.start
        found.append([{cause: ns for cause, ns in window.items() if ns} for window in windows])
        first_step_id += 120
    return found


def test_a_delay_that_goes_round_is_that_of_the_last_steps_and_not_of_older_ones() -> None:
    """The delays of three stages are sums over about 24 steps: e to the power of 40/24 is 5."""
    before = ArtificialPipeline((S,) * 3, slots=3, schedule_ns=S // 2)
    after = ArtificialPipeline((S,) * 3, slots=3, token_return_ns=S // 8, transfer_ns=S * 3 // 8)
    _, windows = waits_in_turn(3, before, after)
    first, second, third = (window["host"] / sum(window.values()) for window in windows)
    assert 0.2 < first < 0.5
    assert 3 < first / second < 12
    assert 3 < second / third < 12


def test_delays_of_a_pipeline_that_is_not_full_are_nothing_that_goes_round() -> None:
    alone = ArtificialPipeline((S,) * 3, slots=1, schedule_ns=S // 2)
    full = ArtificialPipeline((S,) * 3, slots=3, transfer_ns=S // 8)
    _, windows = waits_in_turn(3, alone, full)
    assert [set(window) - {"fill_drain"} for window in windows] == [{"transfer"}] * 3
