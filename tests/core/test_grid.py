"""Where ranks sit: the inverse of the arithmetic, and their names."""

from __future__ import annotations

import pytest

from ppserve.config import PipelineSettings
from ppserve.core.grid import RankGrid, RankPlace
from ppserve.errors import ConfigError


def test_the_ranks_of_a_replica_are_in_order_of_stages_then_of_tensor_ranks() -> None:
    grid = RankGrid(tensor=2, data=2, pipeline=2)
    assert [grid.place(rank) for rank in grid.ranks_of(1)] == [
        RankPlace(1, stage, tensor) for stage in (0, 1) for tensor in (0, 1)
    ]
    assert sorted(grid.ranks_of(0) + grid.ranks_of(1)) == list(range(8))


def test_a_name_leaves_out_what_there_is_only_one_of() -> None:
    assert RankGrid(1, 1, 2).name(1) == "stage 1"
    assert RankGrid(1, 2, 2).name(2) == "replica 0 stage 1"
    assert RankGrid(2, 1, 2).name(3) == "stage 1 tensor 1"
    assert RankGrid(2, 2, 2).name(7) == "replica 1 stage 1 tensor 1"


def test_stages_are_what_tensor_ranks_and_replicas_leave() -> None:
    assert PipelineSettings(tensor_parallel=2, replicas=2).grid(12) == RankGrid(2, 2, 3)
    with pytest.raises(ConfigError, match="2 tensor ranks x 2 replicas do not divide 6 ranks"):
        PipelineSettings(tensor_parallel=2, replicas=2).grid(6)
