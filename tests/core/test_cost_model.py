import random

import pytest

from ppserve.core.cost_model import Coefficients, StageCost, StepSize
from ppserve.core.plan import Draw, Slice, StepPlan
from ppserve.core.request import SamplingParams

TRUTH = Coefficients(step=4e-3, row=2e-4, key=3e-8, sample=1e-4)
DECODE = [StepSize(n, n * context, n) for n in (1, 4, 8, 16) for context in (50, 200, 800)]
PREFILL = [StepSize(n, n * n // 2, s) for n in (64, 128, 256, 512) for s in (0, 1)]
MIXED = [StepSize(n + 8, n * n // 2 + 8 * 300, 8) for n in (64, 128, 256)]


def fitted(loads: list[StepSize], noise: float = 0.0, late: float = 0.0, repeats: int = 20) -> StageCost:
    rng = random.Random(1)
    cost = StageCost()
    for _ in range(repeats):
        for load in rng.sample(loads, len(loads)):
            seconds = TRUTH.seconds(load) * rng.uniform(1 - noise, 1 + noise)
            cost.observe(load, seconds * (rng.uniform(5, 50) if rng.random() < late else 1))
    return cost


def worst_error(cost: StageCost, loads: list[StepSize]) -> float:
    predicted = [cost.coefficients.seconds(load) for load in loads]
    return max(abs(p / TRUTH.seconds(load) - 1) for p, load in zip(predicted, loads, strict=True))


def test_a_plan_in_the_models_terms():
    draw = Draw(SamplingParams())
    decode = Slice(0, 9, (1,), (0,), draw)
    chunk = Slice(1, 4, (1, 2, 3), (1,))
    scored = Slice(2, 0, (1, 2), (2,), draw, targets=(2,))
    plan = StepPlan(1, 1, 0, (decode, chunk, scored))
    assert StepSize.from_plan(plan) == StepSize(rows=6, context=10 + 6 + 1.5, sampled=3)


def test_eight_rows_of_a_sequence_read_their_keys_together():
    """Each as many as are before it and itself; a draft token beside a token hardly costs more than the token."""
    keys = [StepSize().with_slice(100, num_tokens, 0).context for num_tokens in (0, 1, 2, 8, 64)]
    assert keys == [0, 101, 101.5, 104.5, 8 * 132.5]


def test_exact_times_are_learnt_exactly():
    cost = fitted(DECODE + PREFILL + MIXED)
    assert worst_error(cost, DECODE + PREFILL + MIXED) < 1e-3
    assert cost.coefficients.row == pytest.approx(TRUTH.row, rel=0.01)
    assert cost.coefficients.key == pytest.approx(TRUTH.key, rel=0.05)


def test_noise_and_late_steps():
    loads = DECODE + PREFILL + MIXED
    assert worst_error(fitted(loads, noise=0.1), loads) < 0.06
    assert worst_error(fitted(loads, noise=0.1, late=0.03), loads) < 0.10


def test_pure_decode_predicts_decode_although_rows_and_sampled_cannot_be_told_apart():
    cost = fitted(DECODE)
    assert worst_error(cost, DECODE) < 1e-3
    assert worst_error(cost, [StepSize(64, 64 * 100, 64)]) < 0.05


def test_a_further_row_costs_nothing_until_one_was_seen():
    """Else steps of one row each, a lone caller's, would say that a draft token is too expensive to be tried."""
    one_row, two_rows = StepSize(1, 400, 1), StepSize(2, 800, 2)
    cost = fitted([one_row])
    assert cost.coefficients.seconds(two_rows) == pytest.approx(TRUTH.seconds(one_row), rel=0.005)
    for size in [two_rows] * 3 + [one_row] * 16:
        cost.observe(size, TRUTH.seconds(size))
    assert cost.coefficients.seconds(two_rows) == pytest.approx(TRUTH.seconds(two_rows), rel=1e-3)


def test_a_machine_that_slows_down_is_followed_and_decodes_do_not_change_the_fit_of_prompts():
    for factor, kept in ((1, PREFILL), (3, ())):
        cost = fitted(DECODE + PREFILL)
        for _ in range(200):
            for load in DECODE:
                cost.observe(load, factor * TRUTH.seconds(load))
        assert cost.coefficients.seconds(DECODE[5]) == pytest.approx(factor * TRUTH.seconds(DECODE[5]), rel=0.05)
        assert not kept or worst_error(cost, kept) < 0.02


def test_no_term_is_negative_whatever_was_measured():
    rng = random.Random(2)
    for _ in range(50):
        cost = StageCost()
        for _ in range(30):
            load = StepSize(rng.randrange(1, 600), rng.randrange(1, 99999), rng.randrange(20))
            cost.observe(load, rng.expovariate(100))
        terms = cost.coefficients
        assert min(terms.step, terms.row, terms.key, terms.sample) >= 0


def test_times_of_zero_or_less_are_ignored():
    cost = StageCost()
    cost.observe(DECODE[0], 0.0)
    cost.observe(DECODE[0], -1.0)
    assert cost.num_observed == cost.coefficients.seconds(DECODE[0]) == 0


def test_what_is_remembered_of_steps_does_not_grow_with_their_sizes() -> None:
    cost = StageCost()
    for rows in range(1, 1024):
        cost.observe(StepSize(rows, rows, 1), TRUTH.seconds(StepSize(rows, rows, 1)))
    assert len(cost._groups) == 10, "sizes up to twice the smallest are a group"
