"""Memory that is there before it is written."""

from __future__ import annotations

import mmap
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from ppserve import Pipeline
from ppserve.core.architecture import Split, stage_layouts
from ppserve.core.plan import Slice, StepPlan
from ppserve.model.cpu import prefault as memory
from ppserve.model.cpu.backend import CpuBackend
from ppserve.model.cpu.kv_cache import CpuCache
from ppserve.model.cpu.prefault import Prefaulter
from ppserve.model.inputs import build_inputs
from tests.model.random_checkpoint import architecture

needs_populate = pytest.mark.skipif(
    not memory._can_populate(), reason="needs a Linux of 5.14 or newer (MADV_POPULATE_WRITE)"
)


def until(condition: Callable[[], bool]) -> None:
    given_up_s = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < given_up_s
        time.sleep(0.005)


def never_written(num_blocks: int, block_bytes: int) -> torch.Tensor:
    """(1, blocks, numbers) of memory that no other test can have used."""
    memory = mmap.mmap(-1, num_blocks * block_bytes)
    return torch.from_numpy(numpy.frombuffer(memory, numpy.float32)).view(1, num_blocks, -1)


def faults_of_writing(array: torch.Tensor) -> int:
    """Pages that the system had to clear while this thread wrote all of it."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    array.fill_(1.0)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def end(ahead: Prefaulter, num_blocks: int) -> None:
    ahead.mark_used(num_blocks)
    ahead.thread.join(100)
    assert not ahead.thread.is_alive()


@needs_populate
def test_memory_that_was_taken_ahead_is_written_without_a_fault() -> None:
    prepared, fresh = never_written(16, 1 << 19), never_written(16, 1 << 19)
    ahead = Prefaulter(prepared, least_ahead=16)
    until(lambda: ahead.num_ready == 16)
    assert faults_of_writing(fresh) >= 4  # of huge pages; thousands of small ones
    assert faults_of_writing(prepared) <= 2
    end(ahead, 16)


@needs_populate
def test_as_much_again_as_is_used_and_a_least_amount() -> None:
    """Of blocks of 512 KB, four of which are taken at once."""
    array = never_written(1024, 1 << 19)
    ahead = Prefaulter(array, least_ahead=16)
    for used, ready in ((0, 16), (8, 24), (40, 80)):
        ahead.mark_used(used)
        until(lambda ready=ready: ahead.num_ready >= ready)  # type: ignore[misc]
        time.sleep(0.05)
        assert ahead.num_ready <= ready + 4
    assert int(array[:, :128].count_nonzero()) == 0
    end(ahead, 1024)


@needs_populate
def test_what_is_there_is_left_as_it_is() -> None:
    array = torch.arange(3 * 64 * 1024, dtype=torch.float32).view(3, 64, 1024)
    expected = array.clone()
    ahead = Prefaulter(array, least_ahead=64)
    until(lambda: ahead.num_ready == 64)
    assert torch.equal(array, expected)
    end(ahead, 64)


@needs_populate
def test_a_cache_has_memory_for_what_it_is_told_at_first() -> None:
    (layout,) = stage_layouts(Split.parse("2"))
    backend = CpuBackend("float32")
    assert backend.make_cache(architecture(), layout, 400, 16).prefaulter is None
    cache = backend.make_cache(architecture(), layout, 400, 16, num_ahead=128)
    ahead = cache.prefaulter
    assert ahead is not None
    until(lambda: ahead.num_ready >= 128)
    table = tuple(range(399, 400 - 9, -1))
    inputs = build_inputs(StepPlan(1, 0, 0, (Slice(0, 0, (1,), table),)), layout, cache)
    cache.begin(inputs.rows)
    ahead.thread.join(100)
    assert ahead.num_ready == 400


def test_memory_that_was_set_aside_is_taken_at_once_and_other_memory_as_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, int]] = []
    make_cache = CpuBackend.make_cache

    def noted(backend: CpuBackend, *shape: Any, num_ahead: int = 0) -> CpuCache:
        if num_ahead:
            asked.append((num_ahead, shape[2]))
        return make_cache(backend, *shape, num_ahead=num_ahead)

    monkeypatch.setattr(CpuBackend, "make_cache", noted)
    with Pipeline("tiny", kv_cache_memory=16 << 20), Pipeline("tiny"):
        pass
    (all_ahead, num_blocks), (some_ahead, _) = asked
    assert all_ahead == num_blocks
    assert some_ahead * 16 == 2048


@needs_populate
def test_a_closed_cache_leaves_no_thread() -> None:
    (layout,) = stage_layouts(Split.parse("2"))
    cache = CpuBackend("float32").make_cache(architecture(), layout, 400, 16, num_ahead=128)
    assert cache.prefaulter is not None
    cache.close()
    cache.prefaulter.thread.join(100)
    assert not cache.prefaulter.thread.is_alive()


def test_a_system_that_cannot_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", 9999)
    assert not memory._can_populate()
    ahead = Prefaulter(torch.zeros(1, 4, 16), least_ahead=4)
    ahead.thread.join(100)
    assert not ahead.thread.is_alive()
    assert ahead.num_ready == 0
    ahead.mark_used(3)
