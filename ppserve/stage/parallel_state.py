"""The groups, ranks and neighbours of this process.

The functions are named as in Megatron-LM, and the order of ranks is Megatron's default: tensor parallelism varies
fastest, then data parallelism, then pipeline parallelism. In a world of tensor x data x pipeline ranks, the number
of a rank is

    r = tensor + T * (data + D * pipeline)        T, D: sizes of the tensor and data axes

so 8 ranks with T = 2 and two stages are stage 0: [0 1 2 3], stage 1: [4 5 6 7], tensor groups [0 1],
[2 3], [4 5], [6 7], pipeline groups [0 4], [1 5], [2 6], [3 7].

Two things differ from Megatron on purpose. A pipeline is a line, not a ring: the first stage has no previous rank
and the last stage no next rank, so that nobody can send backwards by accident. And all state is one frozen object
in one variable, which `initialize_model_parallel` and `destroy_model_parallel` replace as a whole, so that a
process can leave a broken pipeline and join the next one.

`RankGrid` (ppserve/core/grid.py) has the arithmetic of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from ppserve.core.grid import RankGrid, RankPlace


class ParallelStateError(RuntimeError):
    """Groups were asked for before they existed, or were to be made while they existed."""


@dataclass(frozen=True, slots=True)
class ParallelGroup:
    """A group as one of its members sees it. Ranks are global ones. Neighbours are None at the ends.

    process_group: the `group` that functions of `torch.distributed` take.
    """

    ranks: tuple[int, ...]
    rank_in_group: int
    process_group: dist.ProcessGroup

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def rank(self) -> int:
        return self.ranks[self.rank_in_group]

    @property
    def first_rank(self) -> int:
        return self.ranks[0]

    @property
    def last_rank(self) -> int:
        return self.ranks[-1]

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    @property
    def next_rank(self) -> int | None:
        return None if self.is_last_rank else self.ranks[self.rank_in_group + 1]

    @property
    def prev_rank(self) -> int | None:
        return None if self.is_first_rank else self.ranks[self.rank_in_group - 1]


@dataclass(frozen=True, slots=True)
class _ParallelState:
    grid: RankGrid
    tensor: ParallelGroup
    data: ParallelGroup
    pipeline: ParallelGroup


_state: _ParallelState | None = None


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    *,
    data_parallel_size: int | None = None,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Create the groups of this world. Every rank must call this, with the same sizes.

    data_parallel_size: None: as many as the world has room for. backend, timeout: those of the groups; None: those
    of the default process group (give a timeout: the library's own are 10 and 30 minutes). Raises ValueError if
    the product of the sizes is not the size of the world, and ParallelStateError if `torch.distributed` is not
    initialised or the groups exist already.
    """
    global _state
    if _state is not None:
        raise ParallelStateError("model parallelism is already initialised; call destroy_model_parallel() first")
    if not dist.is_initialized():
        raise ParallelStateError("torch.distributed is not initialised; call dist.init_process_group() first")
    grid = fit_grid(
        dist.get_world_size(), tensor_model_parallel_size, pipeline_model_parallel_size, data_parallel_size
    )

    # Axes with the same ranks share one group, because each group has connections, and a thread that wakes up 100
    # times a second.
    known: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def create(groups: tuple[tuple[int, ...], ...]) -> ParallelGroup:
        # All ranks of the world must call dist.new_group: every rank creates every group, in the same order, and
        # keeps the one to which it belongs.
        mine: ParallelGroup | None = None
        for ranks in groups:
            if ranks not in known:
                known[ranks] = dist.new_group(list(ranks), backend=backend, timeout=timeout)
            if dist.get_rank() in ranks:
                mine = ParallelGroup(ranks, ranks.index(dist.get_rank()), known[ranks])
        assert mine is not None
        return mine

    _state = _ParallelState(
        grid,
        tensor=create(groups_of(grid, "tensor")),
        data=create(groups_of(grid, "replica")),
        pipeline=create(groups_of(grid, "stage")),
    )


def fit_grid(world_size: int, tensor: int, pipeline: int, data: int | None = None) -> RankGrid:
    """Return the grid that fills a world. data: None: as many copies as fit. Raises ValueError if no grid fills
    it."""
    for name, size in (("tensor", tensor), ("pipeline", pipeline), ("data", data)):
        if size is not None and size < 1:
            raise ValueError(f"the {name}-parallel size is {size}; it must be at least 1")
    grid = RankGrid(tensor, max(1, world_size // (tensor * pipeline)) if data is None else data, pipeline)
    if grid.size != world_size:
        sizes = f"tensor {tensor} x pipeline {pipeline}" + (f" x data {data}" if data is not None else "")
        raise ValueError(f"{sizes} does not fill a world of {world_size} ranks")
    return grid


def groups_of(grid: RankGrid, axis: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that differ only on one axis. axis: a field of `RankPlace`."""
    found: dict[RankPlace, list[int]] = {}
    for rank in range(grid.size):
        found.setdefault(replace(grid.place(rank), **{axis: 0}), []).append(rank)
    return tuple(map(tuple, found.values()))


def model_parallel_is_initialized() -> bool:
    return _state is not None


def destroy_model_parallel() -> None:
    """Forget the groups and close them, if there are any. This never waits for other ranks.

    It works even if the default process group no longer exists, and if neighbours are dead.
    """
    global _state
    state, _state = _state, None
    if state is None or not dist.is_initialized():
        return
    # All ranks close them in the same order, each once.
    for process_group in dict.fromkeys(g.process_group for g in (state.tensor, state.data, state.pipeline)):
        dist.destroy_process_group(process_group)


def _initialized() -> _ParallelState:
    if _state is None:
        raise ParallelStateError("model parallelism is not initialised; call initialize_model_parallel() first")
    return _state


# These return groups as objects that know this rank's place.


def get_tp_group() -> ParallelGroup:
    return _initialized().tensor


def get_dp_group() -> ParallelGroup:
    return _initialized().data


def get_pp_group() -> ParallelGroup:
    return _initialized().pipeline


# These are Megatron's functions. The ranks called first, last, next, prev and src are global; `rank` alone is the
# one within the group.


def get_tensor_model_parallel_group() -> dist.ProcessGroup:
    return get_tp_group().process_group


def get_tensor_model_parallel_world_size() -> int:
    return get_tp_group().world_size


def get_tensor_model_parallel_rank() -> int:
    return get_tp_group().rank_in_group


def get_tensor_model_parallel_src_rank() -> int:
    return get_tp_group().first_rank


def get_data_parallel_group() -> dist.ProcessGroup:
    return get_dp_group().process_group


def get_data_parallel_world_size() -> int:
    return get_dp_group().world_size


def get_data_parallel_rank() -> int:
    return get_dp_group().rank_in_group


def get_data_parallel_src_rank() -> int:
    return get_dp_group().first_rank


def get_pipeline_model_parallel_group() -> dist.ProcessGroup:
    return get_pp_group().process_group


def get_pipeline_model_parallel_world_size() -> int:
    return get_pp_group().world_size


def get_pipeline_model_parallel_rank() -> int:
    return get_pp_group().rank_in_group


def get_pipeline_model_parallel_first_rank() -> int:
    return get_pp_group().first_rank


def get_pipeline_model_parallel_last_rank() -> int:
    return get_pp_group().last_rank


def get_pipeline_model_parallel_next_rank() -> int | None:
    """Return the next stage's rank; None on the last stage (Megatron would wrap around)."""
    return get_pp_group().next_rank


def get_pipeline_model_parallel_prev_rank() -> int | None:
    """Return the previous stage's rank; None on the first stage (Megatron would wrap around)."""
    return get_pp_group().prev_rank


def is_pipeline_first_stage() -> bool:
    return get_pp_group().is_first_rank


def is_pipeline_last_stage() -> bool:
    return get_pp_group().is_last_rank
