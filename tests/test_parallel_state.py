"""Ranks, groups and neighbours: the arithmetic for any world, and real gloo worlds of 1, 2 and 4."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import parallel_state as ps
from ppserve.core.grid import RankGrid, RankPlace
from tests.worlds import World

sizes = st.integers(1, 9)


@given(sizes, sizes, sizes)
def test_each_axis_partitions_the_world_and_groups_of_two_axes_share_at_most_one_rank(
    tensor: int, data: int, pipeline: int
) -> None:
    grid = RankGrid(tensor, data, pipeline)
    axes = [ps.groups_of(grid, axis) for axis in ("tensor", "replica", "stage")]
    for size, groups in zip((tensor, data, pipeline), axes, strict=True):
        assert all(len(group) == size for group in groups)
        assert sorted(rank for group in groups for rank in group) == list(range(grid.size))
    for one, other in itertools.combinations(axes, 2):
        home = {rank: number for number, group in enumerate(other) for rank in group}
        assert all(len({home[rank] for rank in group}) == len(group) for group in one)


def test_tensor_is_fastest_and_pipeline_slowest() -> None:
    grid = ps.fit_grid(1024, tensor=8, pipeline=16)
    assert grid == RankGrid(tensor=8, data=8, pipeline=16)
    assert ps.groups_of(grid, "tensor")[0] == tuple(range(8))
    assert ps.groups_of(grid, "replica")[0] == tuple(range(0, 64, 8))
    assert ps.groups_of(grid, "stage")[0] == tuple(range(0, 1024, 64))
    assert grid.place(3 + 8 * 2 + 64 * 5) == RankPlace(replica=2, stage=5, tensor=3)


@pytest.mark.parametrize(
    ("world", "tensor", "pipeline", "data", "says"),
    [
        (4, 1, 3, None, "tensor 1 x pipeline 3 does not fill a world of 4 ranks"),
        (2, 1, 4, None, "does not fill a world of 2 ranks"),
        (4, 1, 2, 1, "tensor 1 x pipeline 2 x data 1 does not fill a world of 4 ranks"),
        (4, 0, 2, None, "the tensor-parallel size is 0"),
        (4, 1, -2, None, "the pipeline-parallel size is -2"),
        (4, 1, 2, 0, "the data-parallel size is 0"),
    ],
)
def test_sizes_that_do_not_multiply_to_the_world(
    world: int, tensor: int, pipeline: int, data: int | None, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        ps.fit_grid(world, tensor, pipeline, data)


ASKING = [name for name in dir(ps) if name.startswith(("get_", "is_pipeline_"))]


def test_asking_before_initialisation_is_a_clear_error() -> None:
    assert len(ASKING) == 20
    assert not ps.model_parallel_is_initialized()
    for name in ASKING:
        with pytest.raises(ps.ParallelStateError, match="call initialize_model_parallel"):
            getattr(ps, name)()
    with pytest.raises(ps.ParallelStateError, match="init_process_group"):
        ps.initialize_model_parallel()
    ps.destroy_model_parallel()


# Real worlds. What follows runs in the ranks.


def join(rank: int, size: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(path, size), rank=rank, world_size=size, timeout=timedelta(seconds=30)
    )


def leave() -> None:
    """Nobody leaves before all are connected: who still connects would see a closed connection."""
    dist.barrier()
    dist.destroy_process_group()


def sum_over(group: dist.ProcessGroup, rank: int) -> int:
    """Proof that a group works: the sum of its members' 10**rank shows who they are."""
    total = torch.tensor([10**rank])
    dist.all_reduce(total, group=group)
    return int(total)


def describe(rank: int, size: int, path: str, tensor: int, pipeline: int) -> dict[str, object]:
    join(rank, size, path)
    ps.initialize_model_parallel(tensor, pipeline, timeout=timedelta(seconds=30))
    seen = {name: getattr(ps, name)() for name in ASKING if not name.endswith("_group")}
    groups = (ps.get_tp_group(), ps.get_dp_group(), ps.get_pp_group())
    seen["sums"] = tuple(sum_over(group.process_group, rank) for group in groups)
    for one, other in itertools.combinations(groups, 2):
        assert (one.process_group is other.process_group) == (one.ranks == other.ranks)
    with pytest.raises(ps.ParallelStateError, match="already initialised"):
        ps.initialize_model_parallel(tensor, pipeline)
    ps.destroy_model_parallel()
    assert not ps.model_parallel_is_initialized()
    leave()
    return seen


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4) as world:
        yield world


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_real_worlds(world: World, size: int, tmp_path: Path) -> None:
    line = world.run(describe, size, str(tmp_path / "line"), 1, size, size=size)
    assert [d["get_pipeline_model_parallel_rank"] for d in line] == list(range(size))
    assert [d["get_pipeline_model_parallel_prev_rank"] for d in line] == [None, *range(size - 1)]
    assert [d["get_pipeline_model_parallel_next_rank"] for d in line] == [*range(1, size), None]
    assert [d["is_pipeline_first_stage"] for d in line] == [r == 0 for r in range(size)]
    assert [d["is_pipeline_last_stage"] for d in line] == [r == size - 1 for r in range(size)]
    everybody = sum(10**r for r in range(size))
    assert [d["sums"] for d in line] == [(10**r, 10**r, everybody) for r in range(size)]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_axis_of_four_ranks(world: World, tmp_path: Path) -> None:
    stages = world.run(describe, 4, str(tmp_path / "data"), 1, 2)
    assert [d["sums"] for d in stages] == [(1, 11, 101), (10, 11, 1010), (100, 1100, 101), (1000, 1100, 1010)]
    assert [d["get_data_parallel_rank"] for d in stages] == [0, 1, 0, 1]
    assert [d["get_pipeline_model_parallel_next_rank"] for d in stages] == [2, 3, None, None]
    tensors = world.run(describe, 4, str(tmp_path / "tensor"), 2, 2)
    assert [d["sums"] for d in tensors] == [(11, 1, 101), (11, 10, 1010), (1100, 100, 101), (1100, 1000, 1010)]
    assert [d["get_tensor_model_parallel_src_rank"] for d in tensors] == [0, 0, 2, 2]
    assert [d["get_data_parallel_world_size"] for d in tensors] == [1] * 4
