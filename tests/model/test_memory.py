"""Memory that is there before it is written."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

import numpy
import pytest
import torch

from ppserve.core.architecture import stage_layouts
from ppserve.model import memory
from ppserve.model.kv_cache import KVCache
from ppserve.model.memory import TakenAhead
from tests.model.random_checkpoint import architecture

CPU = torch.device("cpu")
needs_populate = pytest.mark.skipif(
    not memory._can_populate(), reason="needs a Linux of 5.14 or newer (MADV_POPULATE_WRITE)"
)


def until(condition: Callable[[], bool]) -> None:
    given_up_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < given_up_s
        time.sleep(0.005)


def cache(num_blocks: int, *, takes_ahead: bool) -> KVCache:
    (layout,) = stage_layouts((2,))
    return KVCache(architecture(width=256), layout, num_blocks, 16, "float32", CPU, takes_ahead=takes_ahead)


def faults_of_writing(cache: KVCache) -> int:
    """Pages that the system had to clear while this thread wrote every block."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    cache.keys_LBHdp.fill_(1.0)
    cache.values_LBHpd.fill_(1.0)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@needs_populate
def test_a_cache_that_was_taken_ahead_is_written_without_a_fault() -> None:
    prepared, fresh = cache(128, takes_ahead=True), cache(128, takes_ahead=False)
    ahead = prepared._ahead
    assert ahead is not None
    until(lambda: ahead.num_ready == 128)
    assert faults_of_writing(fresh) >= 4  # of huge pages; hundreds of small ones
    assert faults_of_writing(prepared) <= 2


@needs_populate
def test_as_much_again_as_is_used_and_a_least_amount() -> None:
    """Of blocks of 1 MB, two of which are taken at once."""
    array = torch.from_numpy(numpy.zeros((1, 1024, 1 << 18), "float32"))
    ahead = TakenAhead(array, least_ahead=16)
    for used, ready in ((0, 16), (8, 24), (60, 120)):
        ahead.reach(used)
        until(lambda ready=ready: ahead.num_ready >= ready)  # type: ignore[misc]
        time.sleep(0.05)
        assert ahead.num_ready <= ready + 2
    assert int(array[:, :200].count_nonzero()) == 0


@needs_populate
def test_what_is_there_is_left_as_it_is() -> None:
    array = torch.arange(3 * 64 * 1024, dtype=torch.float32).view(3, 64, 1024)
    expected = array.clone()
    ahead = TakenAhead(array, least_ahead=64)
    until(lambda: ahead.num_ready == 64)
    assert torch.equal(array, expected)


def test_a_system_that_cannot_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", 9999)
    assert not memory._can_populate()
    ahead = TakenAhead(torch.zeros(1, 4, 16), least_ahead=4)
    ahead.reach(3)
    assert ahead.num_ready == 0
