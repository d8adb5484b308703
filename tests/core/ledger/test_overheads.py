from dataclasses import asdict

import pytest

from ppserve.core.ledger.account import in_head_clock
from ppserve.core.ledger.overheads import Overheads, OverheadTimes
from ppserve.core.plan import StepResult, StepStamps
from tests.core.artificial import ArtificialPipeline, plan

MS = 1_000_000


def feed(pipeline: ArtificialPipeline, num_steps: int) -> Overheads:
    overheads = Overheads(len(pipeline.compute_ns))
    for at, _, what, k, i in pipeline.run(num_steps).events():
        if what == "dispatched":
            overheads.dispatched(plan(k), at, at - pipeline.schedule_ns)
        else:
            overheads.reported(StepResult(1, k, i, pipeline.stamps[i, k]), at)
    return overheads


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
    overheads = Overheads(1)
    for k in range(100):
        at = 100 * MS * k
        overheads.dispatched(plan(k), at, at)
        stamps = StepStamps(at + MS, at + 3 * MS, at + 3 * MS, at + 3 * MS, at + 9 * MS, at + 9 * MS)
        if k == 50:  # a pause, which says nothing about steps
            stamps = in_head_clock(stamps, -10**12)
        overheads.reported(StepResult(1, k, 0, stamps), at + 9 * MS)
    assert overheads.times.control_s == pytest.approx(0.001)
    assert overheads.times.prepare_s == pytest.approx(0.002, rel=0.03)


def test_nothing_seen():
    assert Overheads(2).times == OverheadTimes()


def test_what_is_lost_is_forgotten():
    overheads = Overheads(2)
    overheads.dispatched(plan(1), 10, 5)
    overheads.lost()
    stamps = ArtificialPipeline((1, 1), 1).run(2).stamps[0, 1]
    overheads.reported(StepResult(1, 1, 0, stamps), 99)
    assert overheads.times.prepare_s == 0
