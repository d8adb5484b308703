"""`Pipeline(replicas=N)`: the same answers from any number of replicas, also when one is lost in mid-stream."""

from __future__ import annotations

import pytest

from ppserve import Pipeline, wire
from ppserve.errors import StagesLost
from tests.library.mixed import tiny, together

LONG = {"max_tokens": 120, "ignore_eos": True}


def lose(pipeline: Pipeline, replica: int) -> None:
    """Its first stage says that it cannot go on. A thread does not come back."""
    rank = pipeline._engine.replicas[replica].members.first.rank
    pipeline._engine._control.links[rank].send(wire.Failed("as the test wants"))


def test_the_last_replica_that_is_lost_ends_the_pipeline() -> None:
    with tiny(replicas=2) as pipeline:
        lose(pipeline, 1)
        stream = pipeline.stream("Once upon a time", **LONG)
        next(stream)
        lose(pipeline, 0)
        with pytest.raises(StagesLost, match="as the test wants"):
            list(stream)


def test_a_ledger_of_replicas_sums_to_the_wall_for_each_stage_of_each() -> None:
    with tiny(2, replicas=2) as pipeline:
        together(pipeline, [("Once upon a time", {"max_tokens": 20, "seed": seed}) for seed in range(8)])
        ledger = pipeline.ledger()
        worked = [(stage.replica, stage.stage) for stage in ledger.stages if stage.steps]
        assert worked == [(0, 0), (0, 1), (1, 0), (1, 1)]
        walls_s = [stage.busy_s + sum(stage.bubble_s.values()) + stage.idle_s for stage in ledger.stages]
        assert (walls_s[0], walls_s[2]) == pytest.approx((walls_s[1], walls_s[3]), abs=1e-9)
        assert "1.1" in repr(ledger)
        places = [
            (description.replica, description.stage, description.rank)
            for description in pipeline.topology().stages
        ]
        assert places == [(0, 0, 0), (0, 1, 2), (1, 0, 1), (1, 1, 3)]
