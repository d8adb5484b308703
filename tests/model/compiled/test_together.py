"""Processes that lack the same kernels compile each of them once, and at the same time."""
# mypy: ignore-errors
# (numba's compiler has no types that mypy could check)

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
from numba.core.registry import cpu_target

from ppserve.model.compiled.compiling import SharedCache
from ppserve.model.compiled.jit import kernel
from ppserve.model.compiled.lanes import store_int
from ppserve.model.compiled.settings import ForSettings, call_kernel
from ppserve.model.compiled.together import compile_together
from ppserve.model.cpu.kernels.storage import Storage

ROOT = Path(__file__).resolve().parents[3]


class Scripted:
    """A kernel that others may have compiled, or be compiling for some looks."""

    def __init__(self, name: str, done: list[str], kept: bool = False, looks: int = 0) -> None:
        self._name, self._done, self._kept, self._looks = name, done, kept, looks

    def is_kept(self) -> bool:
        return self._kept

    def is_being_compiled(self) -> bool:
        self._looks -= 1
        return self._looks >= 0

    def compile(self) -> None:
        self._done.append(self._name)


def compiled(**kernels: dict[str, object]) -> tuple[list[str], list[tuple[int, int]]]:
    """Return in which order kernels are compiled, and what is told meanwhile."""
    done: list[str] = []
    told: list[tuple[int, int]] = []
    scripted = [Scripted(name, done, **how) for name, how in kernels.items()]
    compile_together(scripted, lambda which, count: told.append((which, count)))
    return done, told


def test_a_kernel_that_another_process_compiles_comes_last() -> None:
    done, told = compiled(a={"looks": 9}, b={}, c={"looks": 1}, d={})
    assert done == ["b", "d", "c", "a"]
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_where_all_are_being_compiled_the_first_is_waited_for() -> None:
    assert compiled(a={"looks": 9}, b={"looks": 9})[0] == ["a", "b"]


def test_kernels_of_an_earlier_start_are_neither_compiled_nor_counted() -> None:
    assert compiled(a={"kept": True}, b={}) == (["b"], [(1, 1)])
    assert compiled(a={"kept": True}) == ([], [])


def twice(x):
    return x + x


SIGNATURE = (numba.types.int64,)


def test_a_cache_tells_what_it_has_and_what_is_being_compiled(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    ours, theirs = SharedCache(twice), SharedCache(twice)
    assert (ours.has(SIGNATURE), ours.is_locked()) == (False, False)
    assert theirs.load_overload(SIGNATURE, cpu_target.target_context) is None
    assert (ours.has(SIGNATURE), ours.is_locked()) == (False, True)
    theirs.save_overload(SIGNATURE, numba.njit(SIGNATURE)(twice).overloads[SIGNATURE])
    assert (ours.has(SIGNATURE), ours.is_locked()) == (True, False)
    assert not ours.has((numba.types.float32,))
    (index,) = tmp_path.rglob("*.nbi")
    index.write_bytes(index.read_bytes()[:-20])
    assert not ours.has(SIGNATURE)


def test_a_kernel_calls_another_by_its_address() -> None:
    """Both are compiled by themselves. The called one gets its setting and the numbers in order."""

    def write(stored, place, number):
        store_int(place, number, 100 * number + stored.element_bytes)

    def write_all(write, place, count):
        for number in range(count):
            call_kernel(write, (place, number))

    called = ForSettings(kernel(write), Storage("bfloat16"))
    caller = ForSettings(kernel(write_all), calls=[called])
    written = np.zeros(4, np.int64)
    caller(written.ctypes.data, 3)
    assert written.tolist() == [2, 102, 202, 0]
    assert caller.kernels == [called.kernel, caller.kernel]


# Prints how often each kernel was compiled in this process: once when the backend of a tensor rank has compiled
# what it needs, and what masks need is compiled; and once when a model has been loaded and tested, tokens have
# been drawn with masks that allow few ids and many, and rows have been exchanged.
CHILD = """
import json, sys
import torch
from ppserve.core.architecture import StageLayout
from ppserve.core.architecture import Cut
from ppserve.core.plan import Draw
from ppserve.core.request import SamplingParams
from ppserve.model import sampling_kernels
from ppserve.model.compiled.together import compile_together
from ppserve.model.cpu.exchange import MemoryGather, memory_bytes
from ppserve.model.cpu.kernels.exchange import EXCHANGE
from ppserve.model.sampling import draw_token
from ppserve.model.checkpoint.opening import open_checkpoint
from ppserve.model.cpu.backend import CpuBackend
backend, checkpoint = CpuBackend("float32"), open_checkpoint("tiny")
kernels = [*backend._work.kernels, *sampling_kernels.KERNELS, *sampling_kernels.OF_MASKS, EXCHANGE]
def misses():
    functions = [each._function for each in kernels]
    return {each.__name__: sum(each._cache_misses.values()) for each in functions}
print("ready", flush=True)
sys.stdin.readline()
def tell(which, count):
    print("told", which, count, file=sys.stderr)
backend.compile(tell, num_tensor=2)
compile_together(sampling_kernels.OF_MASKS, tell)
compiled = misses()
layout = StageLayout(0, 1, 0, 2 * checkpoint.architecture.num_layers)
assert backend.load(checkpoint, layout).check_determinism(16) is None
for mask in (b"\\1", bytes([255] * 20)):
    assert draw_token(0, Draw(SamplingParams(seed=1), mask=mask), 1, torch.zeros(160).numpy()).token_id is not None
gather = MemoryGather(torch.zeros(memory_bytes(1), dtype=torch.uint8), 0, 1)
assert gather.all(torch.ones(3, 5), Cut((5,), 0)).tolist() == [[1.0] * 5] * 3
print(json.dumps([compiled, misses()]))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_share_out_the_kernels_and_no_step_compiles_another(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", CHILD]
    children = [subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) for _ in range(2)]
    try:
        for child in children:
            assert child.stdout.readline() == "ready\n"
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
        outputs = [child.communicate()[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    (first, first_later), (second, second_later) = map(json.loads, outputs)
    assert {"work", "attend_heads", "multiply_rows", "draw", "is_finite"} <= set(first)
    assert {name: first[name] + second[name] for name in first} == dict.fromkeys(first, 1)
    assert sum(first.values()) > 0 < sum(second.values())
    assert (first_later, second_later) == (first, second)
