"""Weights lie in pages that the system was asked to make huge."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ppserve.model.cpu.huge_pages import PAGE_BYTES, HugePages
from ppserve.model.cpu.kernels.memory import LINE_BYTES

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


@pytest.mark.skipif(not THP.exists(), reason="this system has no transparent huge pages")
def test_the_system_is_asked_for_huge_pages() -> None:
    array = HugePages().zeros((3, 1000), np.int32)
    assert "hg" in flags_at(array.ctypes.data)


def test_arrays_lie_apart_on_lines_and_begin_as_zeros() -> None:
    memory = HugePages()
    shapes = [(3, 5), (1,), (1 << 20,), (7, 1 << 21), (64,)]
    arrays = [memory.zeros(shape, np.int32) for shape in shapes]
    assert arrays[0].ctypes.data % PAGE_BYTES == 0
    for number, (array, shape) in enumerate(zip(arrays, shapes, strict=True), 1):
        assert array.shape == shape
        assert array.ctypes.data % LINE_BYTES == 0
        assert not array.any()
        array.fill(number)
    for number, array in enumerate(arrays, 1):
        assert (array == number).all()


def test_too_little_memory_is_told() -> None:
    with pytest.raises(MemoryError, match="MB for weights"):
        HugePages().zeros((1 << 60,), np.int8)


def test_memory_lives_as_long_as_an_array_in_it() -> None:
    first, second = (memory := HugePages()).zeros((1000,), np.int32), memory.zeros((1000,), np.int32)
    del memory, first
    second.fill(5)
    assert (second == 5).all()
