"""Which guesses are computed, and when: the scheduler on a toy pipeline, with a drafter that always guesses."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from ppserve.core.cost_model import StepSize
from ppserve.core.plan import SPECULATIVE, StepPlan, StepResult
from ppserve.core.request import Request
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.drafter import Drafter, Guess
from tests.core.scheduling.rig import SchedulerRig, a_request, fill
from tests.core.toy_pipeline import EOS_ID, STAMPS

NUM_STAGES = 4


class SameCosts:
    """Every step takes 10 ms on every stage."""

    def predict(self, _size: StepSize) -> float:
        return 0.01

    def predict_each(self, _size: StepSize) -> Seq[float]:
        return [0.01] * NUM_STAGES


class Always:
    def guess(self, _token_ids: Seq[int], _guesses: Seq[int]) -> Guess | None:
        return Guess(1, 0.9)


def always(_request: Request, _index: int) -> Drafter:
    return Always()


def a_rig(speculate: int, costs: SameCosts | None = None) -> SchedulerRig:
    config = SchedulerConfig(NUM_STAGES, block_size=4, eos_id=EOS_ID, speculate=speculate)
    return SchedulerRig(config, 400, costs, always)


def first_stage_reports(rig: SchedulerRig, plan: StepPlan) -> None:
    assert rig.steps.reported(StepResult(plan.epoch, plan.step_id, 0, STAMPS), 0) is not None


def test_a_step_on_guesses_is_sent_when_the_first_stage_has_nothing_before_it() -> None:
    rig = a_rig(1, SameCosts())
    rig.submit(a_request("lone", num_prompt=1, max_tokens=40))
    (plan,) = fill(rig)
    for _ in range(1, NUM_STAGES):
        first_stage_reports(rig, plan)
        (plan,) = fill(rig)
        assert plan.phase == SPECULATIVE
    first_stage_reports(rig, plan)
    assert fill(rig) == [], "no stage would stand idle"


def test_requests_that_arrive_find_a_lane_beside_any_number_of_guesses() -> None:
    rig = a_rig(1)
    rig.submit(a_request("guessed", num_prompt=2, max_tokens=40))
    assert [plan.phase for plan in fill(rig)] == ["prefill"] + [SPECULATIVE] * (NUM_STAGES - 1)
    for number in range(1, NUM_STAGES):
        rig.submit(a_request(f"new {number}", num_prompt=2))
        (plan,) = fill(rig)
        assert plan.phase == "prefill"
    rig.drain()
    rig.check_answers()
