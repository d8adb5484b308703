"""One result of several tensor ranks: computing and waiting are the whole step, for the stage and each rank."""

from __future__ import annotations

from dataclasses import replace

from ppserve.core.ledger.tensor_ranks import TensorRanks
from ppserve.core.plan import Drawn, StepResult, StepStamps


def result(place: int, begun: int, ended: int, gathered: int, drawn: tuple[Drawn, ...] = ()) -> StepResult:
    stamps = StepStamps(begun - 3, begun - 2, begun - 1, begun, ended, ended + 1)
    return StepResult(1, 7, place, stamps, bytes_sent=10, drawn=drawn, gathered_ns=gathered)


def test_a_stage_has_reported_when_all_its_ranks_have() -> None:
    ranks = TensorRanks(2, 3)
    assert ranks.add_result(result(4, 100, 200, 20)) is None
    assert ranks.owing(7, 1) == (0, 2)
    assert ranks.add_result(result(3, 90, 210, 30, (Drawn(1, 5),))) is None
    assert ranks.owing(7, 1) == (2,)
    stage = ranks.add_result(result(5, 110, 190, 0))
    assert stage is not None
    assert (stage.stage, stage.drawn, stage.bytes_sent) == (1, (Drawn(1, 5),), 30)
    assert (stage.stamps.begun, stage.stamps.ended, stage.stamps.planned) == (90, 210, 87)
    # Each rank computed 90, 80 and 80 of the stage's 120.
    assert ranks.gathered_ns == [[0, 0, 0], [30, 40, 40]]
    assert (stage.gathered_ns, stage.computed_ns) == (36, 84)


def test_ranks_that_overtake_each_other_are_not_counted_twice() -> None:
    """The second rank begins its next step at 160, while the first computes until 200."""
    ranks, stages = TensorRanks(1, 2), []
    steps = (1, (100, 200), (100, 150)), (2, (210, 300), (160, 300)), (3, (300, 400), (300, 360))
    for step_id, first, second in steps:
        for place, (begun, ended) in enumerate((first, second)):
            stage = ranks.add_result(replace(result(place, begun, ended, 0), step_id=step_id))
        assert stage is not None
        stages.append(stage)
    assert [(stage.stamps.begun, stage.stamps.ended) for stage in stages] == [(100, 200), (200, 300), (300, 400)]
    # Of the 300 from 100 to 400 the first rank computed 290, the second 250: 50, 140 and 60.
    assert ranks.gathered_ns == [[10, 50]]
    # The second step's 100 hold 115 of computing on average: the third has waited 15 less than its own 20.
    assert [stage.gathered_ns for stage in stages] == [25, 0, 5]


def test_what_a_lost_epoch_left_is_forgotten() -> None:
    ranks = TensorRanks(1, 2)
    assert TensorRanks(2, 1).add_result(one := result(1, 100, 200, 0)) is one, "one rank is its stage"
    assert ranks.add_result(result(0, 100, 200, 0)) is None
    ranks.lost()
    assert ranks.add_result(result(1, 100, 200, 0)) is None
    assert ranks.add_result(result(0, 100, 200, 0)) is not None
