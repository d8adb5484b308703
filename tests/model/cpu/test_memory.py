"""Memory for kernels: huge pages that the system was asked for, there before they are written if asked for."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ppserve.core.architecture import Split, stage_layouts
from ppserve.model.backend import NormWeights
from ppserve.model.checkpoint import MatrixInMemory
from ppserve.model.cpu.backend import CpuBackend
from ppserve.model.cpu.kernels.memory import LINE_BYTES, PAGE_BYTES, Arena, huge_pages, start_populating
from ppserve.model.cpu.linear import PackedLinear
from tests.model.random_checkpoint import architecture

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_at(place: int) -> list[str]:
    """What the kernel notes of the memory at an address."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name and not name.endswith(":"):
            begin, end = (int(word, 16) for word in name.split("-"))
            is_there = begin <= place < end
        elif is_there and name == "VmFlags:":
            return values
    raise AssertionError("no memory there")


def faults_of_writing(array: NDArray[np.uint8]) -> int:
    """Pages that the system had to provide while this thread wrote all of it."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    array.fill(1)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.mark.skipif(not THP.exists(), reason="this system has no transparent huge pages")
def test_the_system_is_asked_for_huge_pages() -> None:
    array = Arena().zeros((3, 1000), np.int32)
    assert "hg" in flags_at(array.ctypes.data)


def test_what_is_written_while_memory_is_populated_stays() -> None:
    numbers = huge_pages(16 * PAGE_BYTES).view(np.int64)
    thread = start_populating(numbers.view(np.uint8))
    numbers[:] = np.arange(len(numbers))
    thread.join()
    assert (numbers == np.arange(len(numbers))).all()


def test_a_cache_takes_its_memory_at_the_start_if_asked_to() -> None:
    (layout,) = stage_layouts(Split.parse("2"))
    backend = CpuBackend("float32")
    caches = [
        backend.make_cache(architecture(), layout, 4000, 16, populate=populate) for populate in (True, False)
    ]
    for thread in threading.enumerate():
        if thread.name == "populate":
            thread.join()
    faults = [faults_of_writing(cache.values_LBHc.numpy()) for cache in caches]
    assert faults[0] <= 2 < faults[1]


def test_what_the_self_test_packs_does_not_lie_among_weights() -> None:
    """There it would stay as long as they do."""
    backend = CpuBackend("float32")
    ones = MatrixInMemory(torch.ones(64, 64))
    packed = [backend.linear(ones, None, for_selftest=for_selftest) for for_selftest in (False, True, False)]
    first, _, second = (linear.weights.panels for linear in packed if isinstance(linear, PackedLinear))
    assert second - first == 4 * 64 * 64


def test_logits_of_all_steps_share_their_memory() -> None:
    """If each step took its own, the heap would keep 13 MB for several numbers of rows."""
    backend = CpuBackend("float32")
    head = backend.head(
        NormWeights(torch.ones(32), None, 1e-5), backend.lm_head(MatrixInMemory(torch.randn(100, 32)))
    )
    first_RV = head(torch.randn(64, 32))
    kept_RV = first_RV.clone()
    assert head(torch.randn(3, 32)).data_ptr() == first_RV.data_ptr()
    assert torch.equal(first_RV[3:], kept_RV[3:])


def test_arrays_lie_apart_on_lines_and_begin_as_zeros() -> None:
    arena = Arena()
    shapes = [(3, 5), (1,), (1 << 20,), (7, 1 << 21), (64,)]
    arrays = [arena.zeros(shape, np.int32) for shape in shapes]
    assert arrays[0].ctypes.data % PAGE_BYTES == 0
    for number, (array, shape) in enumerate(zip(arrays, shapes, strict=True), 1):
        assert array.shape == shape
        assert array.ctypes.data % LINE_BYTES == 0
        assert not array.any()
        array.fill(number)
    del arena, arrays[0]  # memory lives as long as an array in it
    for number, array in enumerate(arrays, 2):
        assert (array == number).all()


def test_too_little_memory_is_told() -> None:
    with pytest.raises(MemoryError, match="the system has no 1099511627776 MB"):
        Arena().zeros((1 << 60,), np.int8)
