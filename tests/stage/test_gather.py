"""Gathers between tensor ranks: rows arrive whole, and no rank waits for one that is gone."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ppserve.core.architecture import Cut, StageLayout
from ppserve.errors import TransportError
from ppserve.model.cpu.kernels.atomics import SLEEPERS
from ppserve.model.cpu.kernels.exchange import BUFFER_BYTES, LINE_BYTES
from ppserve.model.inputs import Gather
from ppserve.model.stock import TorchBackend
from ppserve.stage import parallel_state
from ppserve.stage.step import Stage
from ppserve.stage.transport import create_gather
from ppserve.stage.transport.gather import MemoryGather, NoGather, StageGather, connect_ranks
from tests.e2e.serving import wait_until
from tests.worlds import Died, World

WITHIN_S = 20
CPU = torch.device("cpu")
SHAPES = [(1, 5, torch.float32), (3, 7, torch.bfloat16), (130, 64, torch.float32), (2, 9, torch.float64)]


def rows(count: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cut_of(size: int, rank: int, count: int) -> Cut:
    return StageLayout(0, 1, 0, 2, rank, count).cut(size)


def gathers_whole(gather: Gather, rank: int, count: int) -> list[bool]:
    """Rows of several shapes, often enough that buffers are used again."""
    right = []
    for turn in range(12):
        num_rows, width, dtype = SHAPES[turn % len(SHAPES)]
        whole_TN, cut = rows(num_rows, width, dtype, turn), cut_of(width, rank, count)
        gathered_TN = gather.all(whole_TN[:, cut.own], cut)
        right.append(torch.equal(gathered_TN, whole_TN) and gathered_TN.is_contiguous())
    return right


def test_threads_gather_whole_rows() -> None:
    count = 3
    links = connect_ranks(count)
    with ThreadPoolExecutor(count) as threads:
        assert list(threads.map(gathers_whole, links, range(count), [count] * count)) == [[True] * 12] * count
    assert all(link.waited_ns > 0 for link in links)


def test_more_rows_than_fit_follow_in_pieces() -> None:
    width = 1 << 14
    whole_TN = rows(2 * BUFFER_BYTES // (4 * width) + 3, 2 * width, torch.float32)
    cuts = [cut_of(2 * width, rank, 2) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        both = threads.map(lambda link, cut: link.all(whole_TN[:, cut.own], cut), connect_ranks(2), cuts)
        assert all(torch.equal(gathered_TN, whole_TN) for gathered_TN in both)


def test_ranks_exchange_a_row_before_their_first_step() -> None:
    """NCCL makes a group's communicator in its first exchange, which can take seconds."""
    warmed, exchanged = [], []

    class HeadLink(NoGather):
        def __init__(self) -> None:
            self.all = lambda own_Tn, cut: exchanged.append((tuple(own_Tn.shape), cut.widths)) or own_Tn  # type: ignore[func-returns-value]

    transport: Any = SimpleNamespace(warm_up=lambda: warmed.append(True))
    for count in (1, 2):
        layout, backend = StageLayout(0, 1, 0, 4, 0, count), TorchBackend(CPU, "float32")
        model: Any = SimpleNamespace(layout=layout, backend=backend)
        Stage(model, transport, HeadLink()).warm_up()
    assert warmed == [True, True]
    assert exchanged == [((1, 1), (1, 1))]


@pytest.mark.parametrize("by", ["its own interrupt", "the other's end"])
def test_a_wait_ends(by: str) -> None:
    """One that spins does too: the other thread needs the interpreter to end it."""
    waiting, other = connect_ranks(2)
    with ThreadPoolExecutor(1) as threads:
        wait: Future[torch.Tensor] = threads.submit(waiting.all, torch.ones(1, 1), cut_of(2, 0, 2))
        (waiting.interrupt if by == "its own interrupt" else other.close)()
        assert isinstance(wait.exception(WITHIN_S), TransportError)


def line_of(gather: MemoryGather, rank: int) -> torch.Tensor:
    """The numbers of a rank's line: its count, and how many sleep until it counts up."""
    line = gather._memory[rank * LINE_BYTES : (rank + 1) * LINE_BYTES].view(torch.int64)
    return line[[0, SLEEPERS]]


def test_who_waits_sleeps() -> None:
    """Another thread may need the core, and may be the one that is awaited."""
    waiting, other = connect_ranks(2)
    with ThreadPoolExecutor(1) as threads, closing(other):
        thread = Path(f"/proc/self/task/{threads.submit(threading.get_native_id).result()}/stat")
        wait = threads.submit(waiting.all, torch.ones(1, 1), cut_of(2, 0, 2))

        def is_asleep() -> bool:
            # It has counted up, so it needs nothing of the interpreter for which it could sleep.
            has_counted, is_marked = line_of(waiting, 0)[0] == 1, line_of(other, 1)[1] == 1
            return bool(has_counted and is_marked) and " S " in thread.read_text()

        wait_until(is_asleep)
        assert other.all(torch.zeros(1, 1), cut_of(2, 1, 2)).tolist() == [[1, 0]]
        assert wait.result(WITHIN_S).tolist() == [[1, 0]]
    assert line_of(other, 1).tolist() == [1, 0]


def test_a_rank_that_was_left_gives_nothing_more() -> None:
    """A rank that is further behind would take what has no meaning for rows."""
    left, other = connect_ranks(2)
    other.close()
    for _ in range(2):
        with pytest.raises(TransportError, match="gone"):
            left.all(torch.ones(1, 1), cut_of(2, 0, 2))
        assert line_of(left, 0).tolist() == [1, 0]


# ---- processes ----------------------------------------------------------------------------------------------


def meet(rank: int, kind: str, path: str, count: int) -> StageGather:
    store = dist.FileStore(path, count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=WITHIN_S))
    parallel_state.initialize_model_parallel(count, 1)
    return create_gather(kind, parallel_state.get_tp_group())


def part(gather: StageGather) -> None:
    gather.close()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def gather_in_process(rank: int, kind: str, path: str, count: int) -> list[bool]:
    gather = meet(rank, kind, path, count)
    right = gathers_whole(gather, rank, count)
    part(gather)
    return right


def lose_one(rank: int, kind: str, path: str, count: int) -> str:
    """The last rank is killed while the others wait for it; what they are told."""
    gather = meet(rank, kind, path, count)
    gathers_whole(gather, rank, count)
    if rank == count - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    said = ""
    try:
        gather.all(torch.ones(1, 1), cut_of(count, rank, count))
    except TransportError as error:
        said = str(error)
    part(gather)
    return said


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_processes_gather_and_notice_a_death(tmp_path: Path) -> None:
    with World(3) as world:
        for kind in ("gloo", "shm"):
            assert world.run(gather_in_process, kind, str(tmp_path / kind), 3) == [[True] * 12] * 3
        *told, dead = world.run(lose_one, "shm", str(tmp_path / "lost"), 3)
    assert dead == Died(-signal.SIGKILL)
    assert told == ["a tensor rank of this stage is gone"] * 2
