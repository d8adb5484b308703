"""One suite for all transports: order, sizes, dtypes, memory, and what a stage sees when others die.

`local` runs its stages in threads, the others in processes; the functions that play a stage are the same.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
from worlds import Died, World

import parallel_state
from ppserve.core.plan import Slice, StepPlan
from ppserve.errors import ConfigError, TransportError
from ppserve.stage.transport import Frames, Transport, connect, create_transport

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


class Pipeline(Protocol):
    def run(self, play: Play, *args: Any, dtype: torch.dtype = torch.float32) -> list[Any]:
        """What `play(transport, stage, *args)` returned in every stage."""

    def count_descriptors(self) -> list[int]:
        """Open files of every process, between epochs."""


class Threads:
    """Stages of the local transport."""

    def run(self, play: Play, *args: Any, dtype: torch.dtype = torch.float32) -> list[Any]:
        transports = connect((Frames(WIDTH, dtype, depth=DEPTH),) * STAGES)
        with ThreadPoolExecutor(STAGES) as threads:
            running = [threads.submit(play, transport, i, *args) for i, transport in enumerate(transports)]
        return [future.result() for future in running]

    def count_descriptors(self) -> list[int]:
        return [count_descriptors(0)]


class Processes:
    """Stages of the other transports. Every run is an epoch: a fresh store and group in the same processes."""

    def __init__(self, kind: str, folder: Path, size: int = STAGES) -> None:
        self.world = World(size)
        self._kind = kind
        self._folder = folder
        self._epochs = 0

    def run(self, play: Play, *args: Any, dtype: torch.dtype = torch.float32) -> list[Any]:
        self._epochs += 1
        return self.world.run(one_epoch, self._kind, str(self._folder / str(self._epochs)), dtype, play, args)

    def count_descriptors(self) -> list[int]:
        return self.world.run(count_descriptors)


def one_epoch(rank: int, kind: str, path: str, dtype: torch.dtype, play: Play, args: tuple[Any, ...]) -> Any:
    transport = enter_epoch(kind, path, rank, STAGES, dtype)
    try:
        return play(transport, rank, *args)
    finally:
        leave_epoch(transport)


def enter_epoch(kind: str, path: str, stage: int, stages: int, dtype: torch.dtype = torch.float32) -> Transport:
    torch.set_num_threads(1)
    device = torch.device("cuda", stage) if kind == "nccl" else torch.device("cpu")
    dist.init_process_group(
        "nccl" if kind == "nccl" else "gloo",
        store=dist.FileStore(path, stages),
        rank=stage,
        world_size=stages,
        timeout=timedelta(seconds=30),
    )
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
    transport = create_transport(kind, width=WIDTH, dtype=dtype, device=device, depth=DEPTH, max_rows=512)
    transport.warm_up()
    return transport


def leave_epoch(transport: Transport) -> None:
    transport.close()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


needs_gpus = pytest.mark.skipif(torch.cuda.device_count() < STAGES, reason=f"nccl needs {STAGES} GPUs")


@pytest.fixture(scope="module", params=["local", "gloo", "shm", pytest.param("nccl", marks=needs_gpus)])
def pipeline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    if request.param == "local":
        yield Threads()
        return
    processes = Processes(request.param, tmp_path_factory.mktemp(request.param))
    with processes.world:
        yield processes


# What stages do. Each is a whole life of a stage, and runs in every stage of the pipeline.


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
    flush(transport, stage)
    return right


def flush(transport: Transport, stage: int) -> None:
    """Nobody goes on before everybody is here: agreed outside the wires. Threads share their end anyway."""
    if parallel_state.model_parallel_is_initialized():
        dist.barrier()


def thousand_steps(transport: Transport, stage: int, leak: bool) -> int:
    """Bytes by which this process grows in 1,000 steps, once warm."""
    kept = []
    before = 0
    for i in range(1200):
        if i == 200:
            gc.collect()
            before = resident_bytes()
        plan = step(i, SHAPES[i % len(SHAPES)])
        if stage > 0:
            transport.post_receive(plan)
        hidden_TD = transport.receive(plan) if stage > 0 else frame(i, plan.num_tokens)
        if leak:
            kept.append(hidden_TD.clone())
        if stage < STAGES - 1:
            transport.send(plan, hidden_TD.clone())
    growth = resident_bytes() - before
    flush(transport, stage)
    return growth


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def count_descriptors(rank: int) -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


# The suite.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("post_ahead", [0, 1, 20])
def test_frames_arrive_whole_and_in_order(pipeline: Pipeline, dtype: torch.dtype, post_ahead: int) -> None:
    results = pipeline.run(relay, dtype, post_ahead, dtype=dtype)
    assert [len(right) for right in results] == [2 * len(SHAPES), 2 * len(SHAPES), len(SHAPES)]
    assert all(all(right) for right in results)


LEAKED_BYTES = 1000 * WIDTH * 4 * sum(SHAPES) // len(SHAPES)


def test_a_thousand_steps_take_no_memory(pipeline: Pipeline) -> None:
    assert max(pipeline.run(thousand_steps, False)) < LEAKED_BYTES // 4


def test_the_memory_test_can_fail(pipeline: Pipeline) -> None:
    assert max(pipeline.run(thousand_steps, True)) > LEAKED_BYTES // 2


def test_epochs_leave_nothing_open(pipeline: Pipeline) -> None:
    counts = []
    for _ in range(6):
        pipeline.run(relay, torch.float32, 1)
        counts.append(pipeline.count_descriptors())
    assert counts[-1] == counts[1], counts


def ask_for_the_wrong_step(transport: Transport, stage: int) -> list[str]:
    """Steps 0 and 1 are on their way; the receiver asks for step 1 first, then for one never posted."""
    errors = []
    if stage < STAGES - 1:
        transport.send(step(0, 4), frame(0, 4))
    if stage > 0:
        transport.post_receive(step(0, 4))
        for wrong in (step(1, 4), step(2, 4)):
            with pytest.raises(AssertionError) as caught:
                transport.receive(wrong)
            errors.append(str(caught.value))
    flush(transport, stage)
    return errors


def test_a_skipped_step_is_noticed(pipeline: Pipeline) -> None:
    errors = ["step 1 is received where step 0 is next", "step 2 was not posted"]
    assert pipeline.run(ask_for_the_wrong_step) == [[], errors, errors]


def send_what_does_not_fit(transport: Transport, stage: int) -> list[str]:
    errors = []
    if stage == 0:
        for hidden_TD in (
            frame(0, 5),
            frame(0, 4, torch.float64),
            torch.zeros(WIDTH, 4).T,
        ):
            with pytest.raises(AssertionError) as caught:
                transport.send(step(0, 4), hidden_TD)
            errors.append(str(caught.value))
    flush(transport, stage)
    return errors


def test_a_frame_that_does_not_fit_its_plan_is_not_sent(pipeline: Pipeline) -> None:
    shape, dtype, strides = pipeline.run(send_what_does_not_fit)[0]
    assert "(5, 48) is not (4, 48)" in shape
    assert "torch.float64 is not torch.float32" in dtype
    assert "not contiguous" in strides


# Ends of neighbours: processes that die, close, or never come.


def wait_for_death(rank: int, kind: str, path: str, stage: int) -> str:
    """Stages 0 and 2 of three; the middle one dies. Returns what they were told."""
    transport = enter_epoch(kind, path, stage, STAGES)
    said = ""
    try:
        for i in range(10_000):
            plan = step(i, 8)
            if stage == 0:
                transport.send(plan, frame(i, 8))
            else:
                transport.post_receive(plan)
                transport.receive(plan)
    except TransportError as error:
        said = str(error)
    leave_epoch(transport)
    return said


def forward_then_die(rank: int, kind: str, path: str, num_steps: int) -> None:
    """The middle stage: a few steps, then SIGKILL, while the last stage waits for more."""
    transport = enter_epoch(kind, path, 1, STAGES)
    for i in range(num_steps):
        plan = step(i, 8)
        transport.post_receive(plan)
        transport.send(plan, transport.receive(plan).clone())
    os.kill(os.getpid(), 9)


def serve_again(rank: int, kind: str, path: str, stage: int) -> list[bool]:
    transport = enter_epoch(kind, path, stage, STAGES)
    right = relay(transport, stage, torch.float32, 1)
    leave_epoch(transport)
    return right


@pytest.mark.parametrize("kind", ["gloo", "shm"])
def test_a_killed_neighbour_ends_waits_and_survivors_meet_again(kind: str, tmp_path: Path) -> None:
    with World(STAGES + 1) as world:
        path = str(tmp_path / "first")
        world.start(0, wait_for_death, kind, path, 0)
        world.start(2, wait_for_death, kind, path, 2)
        world.start(1, forward_then_die, kind, path, 5)
        assert world.finish(1) == Died(-9)
        for survivor in (0, 2):
            assert world.finish(survivor, timeout_s=10).startswith(kind)
        path = str(tmp_path / "second")
        for process, stage in ((0, 0), (3, 1), (2, 2)):
            world.start(process, serve_again, kind, path, stage)
        assert all(all(world.finish(process)) for process in (0, 3, 2))
    assert not [name for name in os.listdir("/dev/shm") if "ppserve" in name]


def leave_early(transport: Transport, stage: int) -> str:
    """Stage 0 leaves; the others, who wait, are woken one after another as each gives up."""
    said = ""
    flush(transport, stage)
    if stage > 0:
        plan = step(0, 4)
        try:
            transport.post_receive(plan)
            transport.receive(plan)
        except TransportError as error:
            said = str(error)
    transport.close()
    return said


def test_leaving_wakes_everybody_downstream(pipeline: Pipeline) -> None:
    # gloo: what wakes the next stage is the group going away, in `leave_epoch`.
    said = pipeline.run(leave_early)
    assert said[0] == ""
    assert all(said[1:])


def close_from_outside(transport: Transport, stage: int) -> str:
    """The last stage waits for a frame that never comes, until another of its threads closes the transport."""
    said = ""
    if stage == STAGES - 1:
        plan = step(0, 4)
        transport.post_receive(plan)
        closing = threading.Timer(0.2, transport.close)
        closing.start()
        try:
            transport.receive(plan)
        except TransportError as error:
            said = str(error)
        closing.join()
    flush(transport, stage)
    return said


@pytest.mark.parametrize("pipeline", ["local", "shm"], indirect=True)
def test_closing_ends_ones_own_wait(pipeline: Pipeline) -> None:
    assert pipeline.run(close_from_outside)[-1].endswith(("closed", "gone"))


def test_a_single_stage_has_a_transport_without_ends() -> None:
    transport = create_transport(
        "shm", width=WIDTH, dtype=torch.float32, device=torch.device("cpu"), depth=DEPTH
    )
    transport.warm_up()
    assert transport.name == "local"
    with pytest.raises(AssertionError, match="the last stage sends nothing"):
        transport.send(step(0, 1), frame(0, 1))
    transport.close()
    transport.close()


def ask_for_local(transport: Transport, stage: int) -> str:
    flush(transport, stage)
    with pytest.raises(ConfigError) as caught:
        create_transport("local", width=WIDTH, dtype=torch.float32, device=torch.device("cpu"), depth=DEPTH)
    return str(caught.value)


@pytest.mark.parametrize("pipeline", ["shm"], indirect=True)
def test_local_does_not_connect_processes(pipeline: Pipeline) -> None:
    assert all("--transport: 'local'" in said for said in pipeline.run(ask_for_local))
