"""How a stage enters an epoch and leaves it, and which errors only the end of its process can mend."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ppserve import wire
from ppserve.config import TRANSPORTS
from ppserve.core.architecture import Cut, Split, StageLayout, stage_layouts
from ppserve.errors import ConfigError, TransportError
from ppserve.stage.connecting import (
    Connections,
    ProcessConnector,
    join_epoch_store,
    open_epoch_store,
    start_world,
    wait_for_ranks,
)
from ppserve.stage.device import DeviceSetup
from ppserve.stage.link import HeadLink
from ppserve.stage.parallel_state import ParallelGroup
from ppserve.stage.transport import KINDS, Frames, create_transport
from ppserve.stage.transport.gather import GroupGather
from ppserve.stage.transport.point_to_point import GroupBackend, PointToPoint
from tests.model.random_checkpoint import RandomCheckpoint, architecture
from tests.ports import port_to_come_back_to
from tests.stage.one_stage import CPU, WITHIN_S, ByHand, OneStage, Poisoned, plan, start
from tests.worlds import World

pytestmark = pytest.mark.timeout(120)

ILLEGAL = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
TRITON = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
POISONED = Poisoned(**{field.name: getattr(CPU, field.name) for field in fields(CPU)})


class FailsOnce(ByHand):
    """The first transport fails at one of the things that it is asked for."""

    def __init__(self, at: str, error: Exception) -> None:
        super().__init__()
        self._at, self._error = at, error

    def connect(self, form: wire.Form, frames: Frames, link: HeadLink) -> Connections:
        connections = super().connect(form, frames, link)
        transport = self.opened[-1]
        if len(self.opened) == 1:
            transport.fails_at, transport.error, transport.breaks = self._at, self._error, True
            transport.arrived.release()
        return connections


@contextmanager
def failing_stage(connector: FailsOnce, compute: DeviceSetup) -> Iterator[OneStage]:
    """The last of two stages, which has been asked to compute a step of epoch 1."""
    with ThreadPoolExecutor(1) as threads:
        stage = start(threads, 1, 2, connector, RandomCheckpoint(architecture(num_layers=2)), compute)
        stage.hear(wire.Hello)
        stage.load(stage_layouts(Split.parse("1,1"))[1])
        stage.form(1)
        stage.tell(wire.Plan(plan(1, 0)))
        try:
            yield stage
        finally:
            stage.tell(wire.Shutdown())


WHERE = pytest.mark.parametrize("at", ["warm up", "expect 0", "receive 0"])


@WHERE
@pytest.mark.parametrize("error", [ILLEGAL, TRITON])
def test_an_error_that_has_poisoned_the_device_ends_the_stage(at: str, error: Exception) -> None:
    """Its process ends with it, and the keeper starts another: leaving the epoch would not help."""
    with failing_stage(FailsOnce(at, error), POISONED) as stage, pytest.raises(torch.AcceleratorError):
        stage.exit_code.result(WITHIN_S)


@WHERE
def test_any_other_error_is_reported_and_the_epoch_left(at: str) -> None:
    """The control, where the device is well. The wait of a group that is destroyed without an interrupt would have
    no end."""
    connector = FailsOnce(at, TRITON)
    with failing_stage(connector, CPU) as stage:
        if at != "warm up":
            stage.hear(wire.Ready)
        assert "Triton" in stage.hear(wire.Broken).reason
        stage.enter(2)
        stage.enter(3)  # a new epoch ends the one before in the same way
        assert [transport.ends for transport in connector.opened[:2]] == [["interrupt", "close"]] * 2


# ---- what a group's errors become --------------------------------------------------------------------------


class Failing(dist.Work):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def wait(self, timeout: object = None) -> bool:
        raise self._error


def ways(monkeypatch: pytest.MonkeyPatch, error: Exception) -> dict[str, object]:
    """Calls of each way to use a group of torch.distributed, which then raises."""

    def fails(*args: object, **kwargs: object) -> None:
        raise error

    for name in ("isend", "irecv", "all_gather"):
        monkeypatch.setattr(dist, name, fails)
    group = ParallelGroup((0, 1, 2), 1, None)  # type: ignore[arg-type]
    pipe = PointToPoint("nccl", Frames(4, torch.float32), group, GroupBackend())
    gather = GroupGather("nccl", group, GroupBackend())
    return {
        "send": lambda: pipe.send(plan(1, 0), torch.zeros(3, 4)),
        "post": lambda: pipe.post_receive(plan(1, 0)),
        "wait": lambda: pipe._wait(Failing(error)),
        "gather": lambda: gather.all(torch.zeros(2, 2), Cut((2, 2), 0)),
    }


@pytest.mark.parametrize("way", ["send", "post", "wait", "gather"])
def test_a_lost_device_is_no_transport_error(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    for error, becomes in ((ILLEGAL, torch.AcceleratorError), (TRITON, TransportError)):
        with pytest.raises(becomes, match="illegal"):
            ways(monkeypatch, error)[way]()  # type: ignore[operator]


@pytest.mark.parametrize("transport", ["nccl", "gloo"])
def test_the_watchdog_of_nccl_is_told_before_there_is_one(monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    """Its default ends a process whose neighbour has died. What the operator says is kept."""
    at_start: dict[str, str] = {}

    def start_group(*args: object, **kwargs: object) -> None:
        at_start.update((name, value) for name, value in os.environ.items() if name.startswith("TORCH_NCCL_"))
        raise RuntimeError("no group here")

    monkeypatch.setattr(dist, "init_process_group", start_group)
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"})
    form = wire.Form(1, StageLayout(0, 1, 0, 4), 8, 64, transport, "127.0.0.1", None, "127.0.0.1")
    link = HeadLink(queue.SimpleQueue[wire.FromStage]().put)
    with pytest.raises(RuntimeError, match="no group here"):
        ProcessConnector()._join(form, link)
    ours = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}
    assert at_start == {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", **(ours if transport == "nccl" else {})}


def test_every_transport_of_the_flag_has_an_entry_or_needs_no_processes() -> None:
    assert set(TRANSPORTS) == {"auto", "local", *KINDS}
    with pytest.raises(
        ConfigError, match="--transport: 'local' does not connect processes; choose shm, gloo or nccl"
    ):
        create_transport("local", Frames(4, torch.float32), ParallelGroup((0, 1), 0, None))  # type: ignore[arg-type]


# ---- the process -------------------------------------------------------------------------------------------

LINGERING = """
import threading
from ppserve.stage.__main__ import run_and_exit
threading.Thread(target=threading.Event().wait).start()
def run(): {ends}
run_and_exit(run)
"""


@pytest.mark.parametrize(("ends", "code"), [("raise RuntimeError('poisoned')", 1), ("return 75", 75)])
def test_a_process_ends_though_threads_of_libraries_linger(ends: str, code: int) -> None:
    script = LINGERING.format(ends=ends)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == code
    assert ("RuntimeError: poisoned" in done.stderr) == (code == 1)


# ---- waiting for all ranks in an epoch's store: together, or not at all -----------------------------------------

TIMEOUT = timedelta(seconds=20)


def open_stores(count: int) -> list[dist.Store]:
    store, port = open_epoch_store("127.0.0.1", TIMEOUT)
    return [store, *(join_epoch_store("127.0.0.1", port, TIMEOUT) for _ in range(count - 1))]


def test_all_ranks_wait_for_the_last() -> None:
    stores, asked = open_stores(3), [threading.Event() for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        # Only a rank that waits asks whether the epoch is over.
        early = [threads.submit(wait_for_ranks, stores[n], n, 3, asked[n].set) for n in (0, 1)]
        assert all(event.wait(30) for event in asked)
        assert not any(waiting.done() for waiting in early)
        wait_for_ranks(stores[2], 2, 3, lambda: False)
        for waiting in early:
            waiting.result()


def test_a_lost_epoch_is_not_waited_for() -> None:
    stores, over = open_stores(2), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(wait_for_ranks, stores[0], 0, 2, over.is_set)
        over.set()
        with pytest.raises(TransportError, match="was lost"):
            waiting.result()


def test_a_store_whose_host_died_ends_the_waiting() -> None:
    store, port = open_epoch_store("127.0.0.1", TIMEOUT)
    guest = join_epoch_store("127.0.0.1", port, TIMEOUT)
    del store
    with pytest.raises(TransportError, match="store is gone"):
        wait_for_ranks(guest, 1, 2, lambda: False)


def test_the_store_keeps_to_the_ports_that_it_may_have() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TransportError, match=f"none of {port} to {port} is free"):
            open_epoch_store("127.0.0.1", TIMEOUT, (port, port))
        _store, found = open_epoch_store("127.0.0.1", TIMEOUT, (port, min(port + 50, 65535)))
        assert port < found <= port + 50


def test_a_store_whose_stage_is_gone_is_not_waited_for() -> None:
    """torch would try for longer than the time-out: here, longer than any test may take."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(TransportError, match="cannot reach the epoch's store"):
        join_epoch_store("127.0.0.1", port, timedelta(hours=1))


def start_worlds(rank: int, port: int) -> None:
    """Rank 1 tries alone, and fails; then both form a world."""
    if rank == 1:
        with pytest.raises(RuntimeError, match="timeout"):
            start_world("gloo", dist.HashStore(), 0, 2, timedelta(seconds=0.5))
        store: dist.Store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    else:
        store, _ = open_epoch_store("127.0.0.1", TIMEOUT, (port, port))
    wait_for_ranks(store, rank, 2, lambda: False)
    start_world("gloo", store, rank, 2, timedelta(seconds=5))
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_rank_whose_world_was_lost_while_it_formed_forms_the_next_one_with_a_new_process() -> None:
    with World(2) as world:
        world.run(start_worlds, port_to_come_back_to())
