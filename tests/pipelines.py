"""Pipelines of bare transports for tests: stages that pass frames on, without a model.

`local` runs its stages in threads, the others in processes; the functions that play a stage are the same.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ppserve.core.plan import Slice, StepPlan
from ppserve.stage import parallel_state
from ppserve.stage.transport import Frames, Transport, connect, create_transport
from tests.worlds import World

WIDTH, DEPTH, STAGES = 48, 3, 3
SHAPES = [1, 1, 512, 7, 1, 64, 2, 512, 3, 1, 1, 33]


def step(step_id: int, rows: int) -> StepPlan:
    return StepPlan(1, step_id, 0, (Slice(0, 0, tuple(range(rows)), tuple(range(rows))),))


def frame(step_id: int, rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A step's hidden states: any mix-up of steps, rows or columns shows."""
    numbers_TD = torch.arange(rows * WIDTH, dtype=torch.int64).view(rows, WIDTH)
    return ((numbers_TD * 31 + step_id * 7) % 251).to(dtype)


# A pipeline of each kind: runs one function in every stage at the same time.

Play = Callable[..., Any]


class Threads:
    """Stages of the local transport."""

    def run(self, play: Play, *args: Any, dtype: torch.dtype = torch.float32) -> list[Any]:
        """What `play(transport, stage, *args)` returned in every stage."""
        transports = connect((Frames(WIDTH, dtype, depth=DEPTH),) * STAGES)
        with ThreadPoolExecutor(STAGES) as threads:
            barrier = threading.Barrier(STAGES, timeout=60)
            running = [
                threads.submit(in_thread, barrier, play, transport, i, *args)
                for i, transport in enumerate(transports)
            ]
        return [future.result() for future in running]

    def count_descriptors(self) -> list[int]:
        """Open files of every process, between epochs."""
        return [count_descriptors(0)]


class Processes:
    """Stages of the other transports. Every run is an epoch: a fresh store and group in the same processes."""

    def __init__(self, kind: str, folder: Path, world: World) -> None:
        self._world = world
        self._kind = kind
        self._folder = folder
        self._epochs = 0

    def run(self, play: Play, *args: Any, dtype: torch.dtype = torch.float32) -> list[Any]:
        self._epochs += 1
        return self._world.run(one_epoch, self._kind, str(self._folder / str(self._epochs)), dtype, play, args)

    def count_descriptors(self) -> list[int]:
        return self._world.run(count_descriptors)


Pipeline = Threads | Processes


def one_epoch(rank: int, kind: str, path: str, dtype: torch.dtype, play: Play, args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if kind == "nccl" else torch.device("cpu")
    dist.init_process_group(
        "nccl" if kind == "nccl" else "gloo",
        store=dist.FileStore(path, STAGES),
        rank=rank,
        world_size=STAGES,
        timeout=timedelta(seconds=30),
    )
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=STAGES)
    frames = Frames(WIDTH, dtype, max_rows=512, depth=DEPTH, device=device)
    transport = create_transport(kind, frames, parallel_state.get_pp_group())
    transport.warm_up()
    # A stage that has nothing to wait for would leave while others still connect, and they would see it die.
    dist.barrier()
    try:
        return play(transport, rank, *args)
    finally:
        transport.close()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def relay(transport: Transport, stage: int, dtype: torch.dtype, post_ahead: int) -> list[bool]:
    """Every stage adds one; receives are posted `post_ahead` steps in advance. Whether each frame was right."""
    plans = [step(i, rows) for i, rows in enumerate(SHAPES)]
    right = []
    posted = 0
    for i, plan in enumerate(plans):
        while stage > 0 and posted <= min(i + post_ahead, len(plans) - 1):
            transport.post_receive(plans[posted])
            posted += 1
        expected_TD = frame(plan.step_id, plan.num_tokens, dtype) + (stage - 1)
        hidden_TD = transport.receive(plan) if stage > 0 else expected_TD
        right.append(torch.equal(hidden_TD.cpu(), expected_TD))
        if stage < STAGES - 1:
            num_bytes = transport.send(plan, hidden_TD + 1)
            right.append(num_bytes == plan.num_tokens * WIDTH * dtype.itemsize)
    meet()
    return right


_thread = threading.local()


def in_thread(barrier: threading.Barrier, play: Play, *args: Any) -> Any:
    _thread.barrier = barrier
    return play(*args)


def meet() -> None:
    """Nobody goes on before everybody is here: agreed outside the wires."""
    if parallel_state.model_parallel_is_initialized():
        dist.barrier()
    else:
        _thread.barrier.wait()


def count_descriptors(rank: int) -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
