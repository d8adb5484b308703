"""P lanes, or P + 1 where waiting takes longer than the fixed cost of one more step."""

from __future__ import annotations

from ppserve.core.cost_model import PipelineCosts, StepSize
from ppserve.core.plan import StepStamps
from ppserve.core.scheduling.lane_count import MIN_STEPS, PROBE_STEPS, LaneCount


class Pipeline:
    """Stages that take fixed_s + row_s * rows per step; `rows` is the sum over all lanes."""

    def __init__(self, num_stages: int, fixed_s: float, row_s: float, rows: int) -> None:
        self.fixed_s, self.row_s, self.rows = fixed_s, row_s, rows
        costs = PipelineCosts(num_stages)
        for stage in costs.stages:
            for seen in (1, 4, 16, 64):
                stage.observe(StepSize(seen, 0, 0), fixed_s + row_s * seen)
        self.count = LaneCount(num_stages, costs.fixed_s)
        self.now_s = 0.0
        self.own_s = 0.0

    def run(self, wait_share: float, num_steps: int = 4 * MIN_STEPS, was_full: bool = True) -> int:
        """Steps before each of which every stage waits for a share of its computation, while there are P lanes."""
        count = self.count
        for _ in range(num_steps):
            step_s = self.fixed_s + self.row_s * self.rows / count.choice
            wait_s = wait_share * step_s if count.choice == count.num_stages else 0.0
            for stage in range(count.num_stages):
                planned, begun = self.now_s, self.now_s + self.own_s + wait_s
                times_s = (planned, planned + self.own_s, begun, begun, begun + step_s, begun + step_s)
                count.observe(stage, StepStamps(*(round(1e9 * s) for s in times_s)), was_full)
            self.now_s += self.own_s + wait_s + step_s
        return count.choice


def test_as_many_lanes_as_stages_while_nothing_waits() -> None:
    assert Pipeline(2, fixed_s=0.001, row_s=0.001, rows=64).run(wait_share=0.01) == 2


def test_steps_that_cost_by_the_row_gain_from_one_more_lane_soon() -> None:
    assert Pipeline(2, fixed_s=0.001, row_s=0.001, rows=64).run(wait_share=0.05) == 3


def test_steps_of_one_price_gain_only_once_waiting_exceeds_a_share_of_it() -> None:
    assert Pipeline(2, fixed_s=0.030, row_s=0.0001, rows=16).run(wait_share=0.3) == 2
    assert Pipeline(2, fixed_s=0.030, row_s=0.0001, rows=16).run(wait_share=0.8) == 3


def test_a_stages_own_work_is_no_waiting() -> None:
    pipeline = Pipeline(2, fixed_s=0.001, row_s=0.001, rows=64)
    pipeline.own_s = 0.010
    assert pipeline.run(wait_share=0.0) == 2
    assert pipeline.run(wait_share=0.1) == 2, "a further lane would do it once more"
    assert pipeline.run(wait_share=0.4) == 3


def test_it_comes_back_when_the_load_becomes_small() -> None:
    pipeline = Pipeline(4, fixed_s=0.01, row_s=0.001, rows=256)
    assert pipeline.run(wait_share=0.10) == 5
    pipeline.rows = 8
    assert pipeline.run(wait_share=0.10) == 4


def test_waiting_is_measured_again_after_many_steps() -> None:
    pipeline = Pipeline(2, fixed_s=0.001, row_s=0.001, rows=64)
    assert pipeline.run(wait_share=0.10) == 3
    assert pipeline.run(wait_share=0.0, num_steps=PROBE_STEPS + MIN_STEPS) == 2


def test_waiting_for_want_of_work_decides_nothing() -> None:
    assert Pipeline(2, fixed_s=0.001, row_s=0.001, rows=64).run(wait_share=0.5, was_full=False) == 2


def test_the_pause_after_a_loss_is_no_waiting() -> None:
    pipeline = Pipeline(2, fixed_s=0.001, row_s=0.001, rows=64)
    for _ in range(8):
        pipeline.run(wait_share=0.0, num_steps=MIN_STEPS // 2)
        pipeline.count.lost()
        pipeline.now_s += 10.0
    assert pipeline.count.choice == 2


def test_a_few_steps_decide_nothing() -> None:
    assert Pipeline(2, fixed_s=0.001, row_s=0.001, rows=64).run(0.5, num_steps=MIN_STEPS) == 2


def test_a_single_stage_needs_no_second_lane() -> None:
    assert Pipeline(1, fixed_s=0.001, row_s=0.001, rows=64).run(wait_share=0.5) == 1
