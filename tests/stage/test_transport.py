"""One suite for all transports: order, sizes, dtypes, memory, the ends of waits, and streams of a GPU."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from ppserve.errors import TransportError
from ppserve.stage.device import DeviceSetup
from ppserve.stage.parallel_state import ParallelGroup
from ppserve.stage.transport import Frames, Transport, connect
from ppserve.stage.transport.nccl import NcclBackend, NcclStreamBackend
from ppserve.stage.transport.point_to_point import GroupBackend, PointToPoint
from tests.pipelines import (
    DEPTH,
    SHAPES,
    STAGES,
    WIDTH,
    Pipeline,
    Processes,
    Threads,
    frame,
    meet,
    relay,
    step,
)
from tests.worlds import World

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]
needs_gpus = pytest.mark.skipif(torch.cuda.device_count() < STAGES, reason=f"nccl needs {STAGES} GPUs")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(STAGES) as world:
        yield world


@pytest.fixture(params=["local", "gloo", "shm", pytest.param("nccl", marks=needs_gpus)])
def pipeline(request: pytest.FixtureRequest, world: World, tmp_path: Path) -> Pipeline:
    return Threads() if request.param == "local" else Processes(request.param, tmp_path, world)


# What stages do. Each is a whole life of a stage, and runs in every stage of the pipeline.


def thousand_steps(transport: Transport, stage: int, leak: bool) -> int:
    """Return by how many objects this process grows in 1,000 steps, once warm."""
    kept = []
    before = 0
    for i in range(1200):
        if i == 200:
            before = count_objects()
        plan = step(i, SHAPES[i % len(SHAPES)])
        if stage > 0:
            transport.post_receive(plan)
        hidden_TD = transport.receive(plan) if stage > 0 else frame(i, plan.num_tokens)
        if leak:
            kept.append(hidden_TD.clone())
        if stage < STAGES - 1:
            transport.send(plan, hidden_TD.clone())
    return count_objects() - before


def count_objects() -> int:
    """Count the objects of this process while no frame is under way: stages that are threads share a process."""
    meet()
    gc.collect()
    count = len(gc.get_objects())
    meet()
    return count


# The suite.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("post_ahead", [0, 1, 20])
def test_frames_arrive_whole_and_in_order(pipeline: Pipeline, dtype: torch.dtype, post_ahead: int) -> None:
    results = pipeline.run(relay, dtype, post_ahead, dtype=dtype)
    assert [len(right) for right in results] == [2 * len(SHAPES), 2 * len(SHAPES), len(SHAPES)]
    assert all(all(right) for right in results)


def test_a_thousand_steps_leave_nothing_behind(pipeline: Pipeline) -> None:
    assert max(pipeline.run(thousand_steps, False)) < 100
    assert max(pipeline.run(thousand_steps, True)) >= 1000, "the test can fail"


def test_epochs_leave_nothing_open(pipeline: Pipeline) -> None:
    counts = []
    for _ in range(6):
        pipeline.run(relay, torch.float32, 1)
        counts.append(pipeline.count_descriptors())
    assert counts[-1] == counts[1], counts
    kept = pipeline.run(keep_a_descriptor)
    assert pipeline.count_descriptors() != counts[1], "the test can fail"
    pipeline.run(close_descriptors, kept)


def keep_a_descriptor(transport: Transport, stage: int) -> int:
    """Leave an epoch with one open descriptor more; returns it."""
    return os.open(os.devnull, os.O_RDONLY)


def close_descriptors(transport: Transport, stage: int, kept: list[int]) -> None:
    os.close(kept[stage])


# Ends of waits.


def leave_early(transport: Transport, stage: int) -> str:
    """Stage 0 leaves; the others, who wait, are woken one after another as each gives up."""
    said = ""
    meet()
    if stage > 0:
        plan = step(0, 4)
        try:
            transport.post_receive(plan)
            transport.receive(plan)
        except TransportError as error:
            said = str(error)
    transport.close()
    return said


def test_leaving_wakes_all_stages_downstream(pipeline: Pipeline) -> None:
    # gloo: what wakes the next stage is the group going away, in `leave_epoch`.
    said = pipeline.run(leave_early)
    assert said[0] == ""
    assert all(said[1:])


def interrupt_from_outside(transport: Transport, stage: int) -> str:
    """The last stage waits for a frame that never comes, until another of its threads ends that."""
    said = ""
    if stage == STAGES - 1:
        plan = step(0, 4)
        transport.post_receive(plan)
        interrupting = threading.Timer(0.2, transport.interrupt)
        interrupting.start()
        try:
            transport.receive(plan)
        except TransportError as error:
            said = str(error)
        interrupting.join()
    meet()
    return said


@pytest.mark.parametrize("pipeline", ["local", "shm"], indirect=True)
def test_an_interrupt_ends_ones_own_wait(pipeline: Pipeline) -> None:
    assert pipeline.run(interrupt_from_outside)[-1].endswith(("closed", "gone"))


class AbortableGroup(dist.ProcessGroup):
    """A group whose receives end like NCCL's: not with a neighbour, and when it is aborted as if all were well."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.waiting, self.aborted = threading.Event(), threading.Event()

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> dist.Work:
        return Abortable(self)

    def abort(self) -> None:
        self.aborted.set()


class CountingGroup(dist.ProcessGroup):
    """A group that counts its receives, which are done at once."""

    def __init__(self) -> None:
        super().__init__(1, 2)
        self.num_posted = 0

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> dist.Work:
        self.num_posted += 1
        return Done()


def post_beside_a_frame_that_is_read(rank: int) -> list[int]:
    """How many receives are under way before and after the first of many frames is handed out, and the second."""
    group = CountingGroup()
    dist.Backend.register_backend("counting", lambda store, rank, size, timeout: group, devices=["cpu"])
    dist.init_process_group("counting", store=dist.HashStore(), rank=1, world_size=2)
    try:
        frames, neighbours = Frames(WIDTH, torch.float32, 512, DEPTH), ParallelGroup((0, 1), 1, group)
        transport = PointToPoint("gloo", frames, neighbours, GroupBackend())
        counts = []
        for step_id in range(3 * DEPTH):
            transport.post_receive(step(step_id, 4))
        for step_id in range(3):
            counts.append(group.num_posted - step_id)
            transport.receive(step(step_id, 4))
        return counts
    finally:
        dist.destroy_process_group()


def test_as_many_frames_arrive_ahead_as_may_be_in_flight_while_one_is_read(world: World) -> None:
    world.start(0, post_beside_a_frame_that_is_read)
    assert world.finish(0) == [DEPTH + 1, DEPTH, DEPTH]


class Abortable(dist.Work):
    def __init__(self, group: AbortableGroup) -> None:
        super().__init__()
        self._group = group

    def wait(self, timeout: object = None) -> bool:
        self._group.waiting.set()
        return self._group.aborted.wait(30)


def interrupt_an_abortable_wait(rank: int) -> tuple[str, bool]:
    """What a stage is told that waits over an `AbortableGroup`, and whether the group was aborted."""
    group = AbortableGroup(1, 2)
    dist.Backend.register_backend("abortable", lambda store, rank, size, timeout: group, devices=["cpu"])
    dist.init_process_group("abortable", store=dist.HashStore(), rank=1, world_size=2)
    try:
        neighbours = ParallelGroup((0, 1), 1, group)
        frames = Frames(WIDTH, torch.float32, 512, DEPTH)
        transport = PointToPoint("nccl", frames, neighbours, NcclBackend())
        transport.post_receive(step(0, 4))
        link = threading.Thread(target=lambda: (group.waiting.wait(), transport.interrupt()))
        link.start()
        with pytest.raises(TransportError) as caught:
            transport.receive(step(0, 4))
        link.join()
        return str(caught.value), group.aborted.is_set()
    finally:
        dist.destroy_process_group()


def test_an_aborted_wait_that_ends_well_is_an_error_nonetheless(world: World) -> None:
    """What NCCL's `abort` needs, shown without a GPU."""
    world.start(0, interrupt_an_abortable_wait)
    assert world.finish(0) == ("nccl: the transport is closed", True)


def test_a_group_is_aborted_before_it_may_be_destroyed() -> None:
    """A stage that leaves for other reasons does so too: destroying would wait for its posted receives. It is
    aborted once only."""
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    class SlowGroup:
        def abort(self) -> None:
            assert not begun.is_set()
            begun.set()
            assert may_end.wait(30)
            ended.set()

    backend, group = NcclBackend(), SlowGroup()
    closing = threading.Thread(target=backend.close, args=(group,))  # nothing else has aborted it
    closing.start()
    assert begun.wait(30)
    backend.interrupt(group)  # type: ignore[arg-type]
    with pytest.raises(TransportError, match="not aborted within 0 s"):
        backend.close(group, within_s=0.01)  # type: ignore[arg-type]
    assert closing.is_alive()
    assert not ended.is_set()
    may_end.set()
    closing.join(30)
    assert ended.is_set()
    assert not closing.is_alive()


# Streams.


class Done(dist.Work):
    def wait(self, timeout: object = None) -> bool:
        return True


class OnGpu(torch.Tensor):
    """Says that it is on a GPU, and who uses it."""

    is_cuda = True
    users: list[object]

    def record_stream(self, stream: object) -> None:
        self.users.append(stream)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What the streams of GPUs are asked for. A stream has the name of the thread that made it; what no thread has
    chosen is the stream `compute`."""
    log: list[tuple[str, ...]] = []
    own = threading.local()

    class Stream:
        def __init__(self, device: object, name: str = "") -> None:
            self.name = name or threading.current_thread().name

        def record_event(self) -> str:
            log.append((self.name, "records", f"event {len(log)}"))
            return log[-1][2]

        def wait_event(self, event: str) -> None:
            log.append((self.name, "waits for", event))

    def current(device: object = None) -> Stream:
        return getattr(own, "stream", None) or Stream(device, "compute")

    @contextmanager
    def within(stream: Stream | None) -> Iterator[None]:
        own.stream, before = stream, getattr(own, "stream", None)
        yield
        own.stream = before

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(own, "stream", stream))
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    return log


def test_streams_hand_buffers_over_by_events(monkeypatch: pytest.MonkeyPatch, log: list[tuple[str, ...]]) -> None:
    """A buffer is received into behind the stage's last use of it, at first of its memory; a send goes behind the
    work that makes what is sent."""
    for name in ("isend", "irecv"):
        done = lambda *_, name=name, **__: log.append((torch.cuda.current_stream().name, name)) or Done()  # noqa: E731
        monkeypatch.setattr(dist, name, done)
    monkeypatch.setattr(threading.current_thread(), "name", "transfers")
    group = ParallelGroup((0, 1, 2), 1, None)  # type: ignore[arg-type]
    frames = Frames(WIDTH, torch.float32, 8, depth=1)
    transport = PointToPoint("nccl", frames, group, NcclStreamBackend(frames.device))
    for number in range(3):
        transport.post_receive(step(number, 4))
    for number in range(2):
        transport.receive(step(number, 4))
    transport.send(step(0, 4), torch.zeros(4, WIDTH))
    assert log == [
        *[("compute", "records", "event 0"), ("compute", "records", "event 1")],
        *[("transfers", "waits for", "event 0"), ("transfers", "irecv")],
        *[("transfers", "waits for", "event 1"), ("transfers", "irecv")],
        *[("compute", "records", "event 6"), ("transfers", "waits for", "event 6"), ("transfers", "irecv")],
        *[("compute", "records", "event 9"), ("transfers", "waits for", "event 9"), ("transfers", "isend")],
    ]


def test_stages_that_are_threads_have_streams_of_their_own(log: list[tuple[str, ...]]) -> None:
    """Hidden states are used behind the work that makes them, on whichever stream, and kept until they were."""
    ends = connect((Frames(4, torch.float32), Frames(4, torch.float32)))
    hidden_TD = torch.ones(3, 4).as_subclass(OnGpu)
    hidden_TD.users = []

    def stage(number: int) -> torch.Tensor | None:
        threading.current_thread().name = f"stage {number}"
        with FakeTensorMode():
            DeviceSetup(torch.device("cuda", 0), "float32", 2).bind_this_thread()
        if number == 0:
            ends[0].send(step(0, 3), hidden_TD)
            return None
        ends[1].post_receive(step(0, 3))
        return ends[1].receive(step(0, 3))

    with ThreadPoolExecutor(2) as threads:
        _, received_TD = threads.map(stage, range(2))
    assert received_TD is hidden_TD
    assert log == [("stage 0", "records", "event 0"), ("stage 1", "waits for", "event 0")]
    assert [user.name for user in hidden_TD.users] == ["stage 1"]
