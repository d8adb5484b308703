import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from statistics import fmean

import pytest

from ppserve.core.cost_model import Coefficients, StepSize
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.planning.clock import Clock
from ppserve.planning.cores import Cores, SharedCores
from ppserve.planning.machine import Device, Machine, Roofline, Wires
from ppserve.planning.simulator import Outcome, SimulatedHead, SimulatedRequest, Simulator
from tests.slow import quick_first

FREE = Wires(latency_s=0, bandwidth=1e30, control_s=0, return_s=0, head_s=0, prepare_s=0)
S = 0.01


def simulate(
    stages: tuple[Coefficients, ...],
    requests: list[SimulatedRequest],
    concurrency: int | None = None,
    wires: Wires = FREE,
    acceptance: float = 0.0,
    **scheduling: int,
) -> Outcome:
    limits = {"max_queue": 10**6, "max_queue_tokens": 10**9}
    config = SchedulerConfig(len(stages), prefix_cache=False, **limits, **scheduling)
    machine = Machine(stages, wires, 100_000)
    return Simulator(machine, config, machine if acceptance else None, acceptance).run(requests, concurrency)


def in_turn(factors: tuple[float, ...]) -> Callable[[float], float]:
    """Steps take these multiples of what they should, one after another."""
    endless = itertools.cycle(factors)
    return lambda seconds: seconds * next(endless)


def one_token_prompts(num_requests: int, new_tokens: int) -> list[SimulatedRequest]:
    return [SimulatedRequest(0.0, 1, new_tokens)] * num_requests


def share(outcome: Outcome, stage: int, kind: str) -> float:
    times = outcome.stages[stage]
    return {**times.busy_ns, **times.bubble_ns}[kind] / times.wall_ns


def test_one_sequence_takes_all_stages_in_turn():
    outcome = simulate((Coefficients(S),) * 4, one_token_prompts(1, 10))
    assert outcome.wall_s == pytest.approx(10 * 4 * S)
    assert outcome.ttft_s == pytest.approx((4 * S,))
    assert outcome.itl_s == pytest.approx((4 * S,) * 9)
    assert outcome.duration_s == pytest.approx((40 * S,))
    for stage in range(4):
        assert share(outcome, stage, "fill_drain") == pytest.approx(0.75)


@pytest.mark.parametrize("num_stages", quick_first([1, 2, 3, 4, 8, 64], 5))
def test_flat_stages_with_enough_sequences_are_never_idle(num_stages):
    outcome = simulate((Coefficients(S),) * num_stages, one_token_prompts(num_stages, 10))
    assert outcome.wall_s == pytest.approx((10 * num_stages + num_stages - 1) * S)
    for times in outcome.stages:
        steady = 1 - (num_stages - 1) / (10 * num_stages + num_stages - 1)
        assert sum(times.busy_ns.values()) / times.wall_ns == pytest.approx(steady)
        assert times.bubble_ns["imbalance"] == 0


def test_the_law_of_the_design():
    """throughput = B / max(P·s(B/m) + h, m·s(B/m))"""
    for per_row_s, return_s in ((0.0, 0.0), (1e-3, 0.0), (1e-3, 0.03)):
        wires = replace(FREE, return_s=return_s)
        outcome = simulate((Coefficients(S, per_row_s),) * 4, one_token_prompts(32, 100), wires=wires)
        s = S + 8 * per_row_s
        expected = 32 / max(4 * s + return_s, 4 * s)
        assert outcome.output_tokens_per_s == pytest.approx(expected, rel=0.05)


def test_an_unbalanced_pipeline_waits_for_its_slowest_stage():
    outcome = simulate((Coefficients(S), Coefficients(2 * S)), one_token_prompts(8, 200))
    assert share(outcome, 0, "imbalance") == pytest.approx(0.5, abs=0.02)
    assert share(outcome, 1, "decode") == pytest.approx(1.0, abs=0.02)


def test_what_surrounds_computing_has_its_name():
    slow_links = simulate((Coefficients(S),) * 2, one_token_prompts(2, 200), wires=replace(FREE, latency_s=S))
    assert share(slow_links, 0, "transfer") == pytest.approx(1 / 3, abs=0.02)
    wires = replace(FREE, control_s=S, return_s=S)
    slow_control = simulate((Coefficients(S),) * 2, one_token_prompts(2, 200), wires=wires)
    assert share(slow_control, 0, "token_return") == pytest.approx(1 / 4, abs=0.02)
    assert share(slow_control, 0, "host") == pytest.approx(1 / 4, abs=0.02)
    slow_sends = simulate((Coefficients(S),) * 2, one_token_prompts(2, 200), wires=replace(FREE, sending_s=S))
    assert share(slow_sends, 0, "transfer") == pytest.approx(1 / 2, abs=0.02)


def test_arrivals_in_time():
    outcome = simulate((Coefficients(S),), [SimulatedRequest(0.0, 1, 1), SimulatedRequest(1.0, 1, 1)])
    assert outcome.wall_s == pytest.approx(1 + S)
    assert outcome.stages[0].idle_ns == pytest.approx((1 - S) * 1e9)
    assert outcome.ttft_s == pytest.approx((S, S))


def test_a_closed_loop_keeps_its_concurrency():
    outcome = simulate((Coefficients(S),), one_token_prompts(6, 10), concurrency=2)
    assert outcome.new_tokens == 60
    assert len(outcome.duration_s) == 6
    assert max(outcome.duration_s) <= 12 * S


def test_long_prompts_are_cut_into_chunks_that_fill_the_pipeline():
    stages = (Coefficients(0, 1e-4),) * 4
    whole = simulate(stages, [SimulatedRequest(0.0, 1000, 1)], prefill_chunk=1000)
    chunked = simulate(stages, [SimulatedRequest(0.0, 1000, 1)], prefill_chunk=50)
    assert whole.ttft_s[0] == pytest.approx(0.4)
    assert chunked.ttft_s[0] == pytest.approx(0.1 * 23 / 20)
    assert chunked.prompt_tokens == 1000


def test_a_roofline_reads_weights_or_computes_for_longer():
    device = Device(flops=1e12, memory_bandwidth=1e11, launch_s=1e-4)
    stage = Roofline(
        device, weight_bytes=1e9, flops_per_row=1e9, kv_bytes_per_token=1e4, head_bytes=5e8, head_flops=5e8
    )
    assert stage.seconds(StepSize(1, 0, 0)) == pytest.approx(1e-4 + 0.01)
    assert stage.seconds(StepSize(100, 0, 0)) == pytest.approx(1e-4 + 0.1)
    assert stage.seconds(StepSize(1, 1000, 1)) == pytest.approx(1e-4 + 0.01 + 1e-4 + 0.005)


def test_steps_that_take_unequal_time_make_stages_wait_and_one_more_lane_catches_it():
    """Two stages whose steps cost by the row, late in turn: with two slots each waits for the later of the two."""
    stages = (Coefficients(0.0, S),) * 2
    load = one_token_prompts(12, 400)

    def wall_s(slots: int | None, delayed: Callable[[float], float]) -> float:
        limits = {"max_queue": 10**6, "max_queue_tokens": 10**9}
        config = SchedulerConfig(2, microbatches=slots, prefix_cache=False, **limits)
        machine = Machine(stages, FREE, 100_000, delayed)
        return Simulator(machine, config).run(load).wall_s

    late = (0.7, 1.3, 1.0, 1.2, 0.8)
    even_s = wall_s(2, in_turn((1.0,)))
    two_s, three_s, own_choice_s = (wall_s(slots, in_turn(late)) for slots in (2, 3, None))
    assert two_s > 1.1 * even_s
    assert three_s < 1.05 * even_s
    assert own_choice_s < 1.06 * even_s, "it starts with two slots and finds out"


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_stages_own_work_brings_no_further_lane(num_stages):
    """Inputs and sending are done once more with each step: nothing waits, so nothing is to be gained."""
    stages = (Coefficients(0.4 * S, 0.1 * S),) * num_stages
    wires = replace(FREE, prepare_s=0.1 * S, sending_s=0.1 * S)
    load = one_token_prompts(6 * num_stages, 300)
    fixed, chosen = (simulate(stages, load, wires=wires, **slots) for slots in ({"microbatches": num_stages}, {}))
    assert chosen.wall_s == pytest.approx(fixed.wall_s)


@cache
def one_callers_wall_s(num_stages: int) -> float:
    """Without draft tokens, of the requests of the next test."""
    stages = (Coefficients(row=S),) * num_stages
    return simulate(stages, one_token_prompts(1, 3000), max_model_len=4096).wall_s


@pytest.mark.parametrize("num_stages", quick_first([2, 4]))
@pytest.mark.parametrize("rate", quick_first([1.0, 0.2, 0.5, 0.7, 0.9]))
def test_one_caller_gains_by_depth_what_the_arithmetic_says(num_stages, rate):
    """Every row costs a whole step, so width never pays. Turns without draft tokens are a few percent of all."""
    stages, requests = (Coefficients(row=S),) * num_stages, one_token_prompts(1, 3000)
    drafted = simulate(stages, requests, acceptance=rate, max_model_len=4096)
    ideal = num_stages / (num_stages - (num_stages - 1) * rate)
    assert one_callers_wall_s(num_stages) / drafted.wall_s == pytest.approx(ideal, rel=0.1)


@pytest.mark.parametrize("believed", [0.0, 0.4, 1.0])
def test_a_lone_callers_guesses_pay_by_what_rows_really_cost(believed):
    """The cost model knows other steps, such as short prompts after a pause, and may think a row far too dear."""
    stages, requests = (Coefficients(step=S, row=S / 20),) * 2, one_token_prompts(1, 800)
    config = SchedulerConfig(2, prefix_cache=False)
    machine = Machine(stages, FREE, 100_000)
    costs = replace(machine, stages=(Coefficients(step=S, row=S * believed),) * 2)
    drafted = Simulator(machine, config, costs, acceptance=0.3).run(requests)
    assert simulate(stages, requests).wall_s / drafted.wall_s > 1 + 0.85 * 0.18


def test_one_stage_gains_by_width_alone():
    stages, requests = (Coefficients(step=S, row=S / 50),), one_token_prompts(1, 800)
    plain, drafted = simulate(stages, requests), simulate(stages, requests, acceptance=0.8)
    assert plain.wall_s / drafted.wall_s > 2.5
    assert drafted.stages[0].busy_ns["speculative"] == 0, "there was a gap to fill"


@pytest.mark.parametrize("rate", [0.3, 0.9])
def test_many_callers_lose_nothing_to_guesses(rate):
    stages, requests = (Coefficients(step=S, row=S / 8, sample=S / 100),) * 2, one_token_prompts(64, 30)
    plain, drafted = simulate(stages, requests), simulate(stages, requests, acceptance=rate)
    assert drafted.wall_s <= 1.01 * plain.wall_s


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("row_share", quick_first([0.05, 0.01, 0.02]))
def test_one_callers_guesses_hardly_slow_the_others(num_stages, row_share):
    """The one whose draft tokens are right runs longer than the three others, so that they never are without
    it."""
    lucky, other = SimulatedRequest(0.0, 1, 5000, acceptance=0.95), SimulatedRequest(0.0, 1, 400, acceptance=0.0)
    stages, requests = (Coefficients(step=S, row=S * row_share),) * num_stages, [lucky, other, other, other]
    plain = simulate(stages, requests, max_model_len=8192)
    drafted = simulate(stages, requests, acceptance=0.5, max_model_len=8192)
    for before, after in zip(sorted(plain.duration_s), sorted(drafted.duration_s), strict=True):
        assert after <= before / 0.97
    assert max(drafted.duration_s) < max(plain.duration_s) / 2


@pytest.mark.slow
def test_first_tokens_hardly_wait_for_guesses():
    """Four stages share two cores, beside one caller whose draft tokens are mostly right: 1.12 times as long, if
    what comes meanwhile would not hold his draft tokens back."""
    stages, chance = (Coefficients(step=S, row=S / 20),) * 4, random.Random(0)
    *arrivals_s, last_s = itertools.accumulate((chance.uniform(8, 48) * S for _ in range(40)), initial=3.0)
    requests = [SimulatedRequest(0.0, 8, 2500, acceptance=0.95)]
    requests += [SimulatedRequest(at_s, chance.randint(20, 40), 1, acceptance=0.0) for at_s in arrivals_s]

    def first_s(acceptance: float) -> float:
        clock = Clock()
        cores = Cores(SharedCores(2, (0, 1, 2, 3)), clock)
        machine = Machine(stages, Wires(), 100_000, on=((cores,),) * 4)
        config = SchedulerConfig(4, prefix_cache=False, max_model_len=4096)
        head = SimulatedHead(clock, cores)
        simulator = Simulator(machine, config, machine, acceptance, head=head)
        outcome = simulator.run(requests)
        assert max(outcome.duration_s) > last_s, "the one caller was there all the time"
        return fmean(outcome.ttft_s)

    assert first_s(0.95) < 1.06 * first_s(0.0)


def test_wasted_time_is_told_and_part_of_the_busy_time():
    outcome = simulate((Coefficients(row=S),) * 2, one_token_prompts(1, 600), acceptance=0.5)
    for times in outcome.stages:
        assert times.wasted_ns <= times.busy_ns["speculative"]
    assert outcome.stages[0].wasted_ns > 0


def test_a_cancel_spares_the_stages_that_have_not_begun_the_step():
    """A draft token is on stage 0 while the true token is drawn on stage 1, which then need not compute a wrong
    one."""
    wires = replace(FREE, control_s=0.1 * S, return_s=0.1 * S)
    outcome = simulate((Coefficients(row=S),) * 2, one_token_prompts(1, 600), wires=wires, acceptance=0.5)
    first, last = outcome.stages
    assert last.wasted_ns < first.wasted_ns / 10
    assert last.busy_ns["speculative"] < first.busy_ns["speculative"] - 0.9 * first.wasted_ns


def test_a_guess_that_was_wrong_is_no_token_that_the_head_sends():
    """One stage that computes in no time: only the head's work per token counts, whatever is drafted."""
    wires = replace(FREE, token_s=S)
    outcome = simulate((Coefficients(),), one_token_prompts(1, 200), wires=wires, acceptance=0.5)
    assert outcome.num_steps < 190
    assert outcome.wall_s == pytest.approx(200 * S)


def test_another_seed_has_other_guesses_right():
    machine = Machine((Coefficients(step=S),), FREE, 1000)
    config = SchedulerConfig(1, prefix_cache=False)
    requests = one_token_prompts(1, 400)
    walls = {Simulator(machine, config, machine, 0.5, seed).run(requests).wall_s for seed in (0, 1, 2, 0)}
    assert len(walls) == 3
