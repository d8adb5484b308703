"""The simulator: the law of the design, and the ledger's causes, from the real scheduler."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ppserve.core.cost_model import Coefficients
from ppserve.core.ledger.steps import OverheadTimes
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.planning.shapes import round_seconds
from ppserve.planning.simulator import Outcome, Simulator
from tests.slow import quick_first

FREE = OverheadTimes()
S = 0.01


def simulate(
    stages: tuple[Coefficients, ...],
    num_requests: int,
    new_tokens: int,
    *,
    prompt: int = 1,
    callers: int | None = None,
    overheads: OverheadTimes = FREE,
    **scheduling: int,
) -> Outcome:
    limits = {"max_queue": 10**6, "max_queue_tokens": 10**9}
    config = SchedulerConfig(len(stages), prefix_cache=False, **limits, **scheduling)
    simulator = Simulator(stages, overheads, config, num_blocks=100_000)
    return simulator.run(num_requests, prompt, new_tokens, callers or num_requests)


def share(outcome: Outcome, stage: int, kind: str) -> float:
    times = outcome.stages[stage]
    return {**times.busy_ns, **times.bubble_ns}[kind] / times.wall_ns


def test_one_sequence_takes_all_stages_in_turn() -> None:
    outcome = simulate((Coefficients(S),) * 4, 1, 10)
    assert outcome.wall_s == pytest.approx(10 * 4 * S)
    assert outcome.ttft_s == pytest.approx((4 * S,))
    assert outcome.itl_s == pytest.approx((4 * S,) * 9)
    assert outcome.e2e_s == pytest.approx((40 * S,))
    assert [share(outcome, stage, "fill_drain") for stage in range(4)] == pytest.approx([0.75] * 4)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_the_last_stage_sends_no_hidden_states(num_stages: int) -> None:
    overheads = replace(FREE, sending_s=S / 4)
    outcome = simulate((Coefficients(S),) * num_stages, 1, 10, overheads=overheads)
    assert outcome.wall_s == pytest.approx(10 * (num_stages * S + (num_stages - 1) * S / 4))


@pytest.mark.parametrize("num_stages", quick_first([1, 2, 3, 4, 8, 64], 5))
def test_flat_stages_with_enough_sequences_are_never_idle(num_stages: int) -> None:
    outcome = simulate((Coefficients(S),) * num_stages, num_stages, 10)
    assert outcome.wall_s == pytest.approx((10 * num_stages + num_stages - 1) * S)
    for times in outcome.stages:
        steady = 1 - (num_stages - 1) / (10 * num_stages + num_stages - 1)
        assert sum(times.busy_ns.values()) / times.wall_ns == pytest.approx(steady)
        assert times.bubble_ns["imbalance"] == 0


@pytest.mark.parametrize(("per_row_s", "return_s"), [(0.0, 0.0), (1e-3, 0.0), (1e-3, 0.03)])
def test_the_law_of_the_design(per_row_s: float, return_s: float) -> None:
    """throughput = B / max(P·s(B/m) + h, m·s(B/m))"""
    stages = (Coefficients(S, per_row_s),) * 4
    outcome = simulate(stages, 32, 100, overheads=replace(FREE, return_s=return_s))
    expected = 32 / round_seconds([S + 8 * per_row_s] * 4, 4, return_s)
    assert outcome.figures["output_tokens_per_s"] == pytest.approx(expected, rel=0.05)


def test_an_unbalanced_pipeline_waits_for_its_slowest_stage() -> None:
    outcome = simulate((Coefficients(S), Coefficients(2 * S)), 8, 200)
    assert share(outcome, 0, "imbalance") == pytest.approx(0.5, abs=0.02)
    assert share(outcome, 1, "decode") == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(
    ("overheads", "causes"),
    [
        (replace(FREE, transfer_s=S), {"transfer": 1 / 3}),
        (replace(FREE, control_s=S, return_s=S), {"token_return": 1 / 4, "host": 1 / 4}),
        (replace(FREE, sending_s=S), {"transfer": 1 / 2}),
    ],
)
def test_what_surrounds_computing_has_its_cause(overheads: OverheadTimes, causes: dict[str, float]) -> None:
    outcome = simulate((Coefficients(S),) * 2, 2, 200, overheads=overheads, microbatches=2)
    assert {cause: share(outcome, 0, cause) for cause in causes} == pytest.approx(causes, abs=0.02)


def test_a_closed_loop_keeps_its_callers() -> None:
    outcome = simulate((Coefficients(S),), 6, 10, callers=2)
    assert len(outcome.ttft_s) + len(outcome.itl_s) == 60
    assert len(outcome.e2e_s) == 6
    assert max(outcome.e2e_s) <= 12 * S


def test_long_prompts_are_cut_into_chunks_that_fill_the_pipeline() -> None:
    stages = (Coefficients(0, 1e-4),) * 4
    whole, chunked = (simulate(stages, 1, 1, prompt=1000, prefill_chunk=chunk) for chunk in (1000, 50))
    assert whole.ttft_s[0] == pytest.approx(0.4)
    assert chunked.ttft_s[0] == pytest.approx(0.1 * 23 / 20)
