from dataclasses import asdict

import pytest

from ppserve.core.ledger.account import in_head_clock
from ppserve.core.ledger.overheads import Overheads, OverheadTimes
from ppserve.core.ledger.steps import Steps
from ppserve.core.plan import StepResult, StepStamps
from tests.core.artificial import ArtificialPipeline, plan

MS = 1_000_000


def feed(pipeline: ArtificialPipeline, num_steps: int) -> Overheads:
    steps = Steps(len(pipeline.compute_ns))
    overheads = Overheads(steps)
    for at, _, what, k, i in pipeline.run(num_steps).events():
        if what == "dispatched":
            overheads.dispatched(steps.sent(plan(k), at - pipeline.schedule_ns, at, num_slots=1))
        else:
            report(steps, overheads, StepResult(1, k, i, pipeline.stamps[i, k]), at)
    return overheads


def report(steps: Steps, overheads: Overheads, result: StepResult, at: int) -> None:
    step = steps.reported(result, at)
    assert step is not None
    overheads.reported(step, result.stage)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_every_overhead_is_found(num_stages):
    pipeline = ArtificialPipeline(
        (20 * MS,) * num_stages, 1,
        transfer_ns=1 * MS, sending_ns=2 * MS, token_return_ns=4 * MS, schedule_ns=5 * MS,
    )  # fmt: skip
    found = feed(pipeline, 20).times
    expected = OverheadTimes(head_s=0.005, sending_s=0.002, transfer_s=0.001, return_s=0.004)
    assert asdict(found) == pytest.approx(asdict(expected))


def test_preparing_and_the_way_to_a_stage():
    steps = Steps(1)
    overheads = Overheads(steps)
    for k in range(100):
        at = 100 * MS * k
        overheads.dispatched(steps.sent(plan(k), at, at, num_slots=1))
        stamps = StepStamps(at + MS, at + 3 * MS, at + 3 * MS, at + 3 * MS, at + 9 * MS, at + 9 * MS)
        if k == 50:  # a pause, which says nothing about steps
            stamps = in_head_clock(stamps, -(10**12))
        report(steps, overheads, StepResult(1, k, 0, stamps), at + 9 * MS)
    assert overheads.times.control_s == pytest.approx(0.001)
    assert overheads.times.prepare_s == pytest.approx(0.002, rel=0.03)


def test_nothing_seen():
    assert Overheads(Steps(2)).times == OverheadTimes()
