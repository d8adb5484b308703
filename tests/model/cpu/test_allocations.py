"""A step that decodes takes memory for its rows' hidden states and logits, and for nothing inside a sublayer."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ppserve.core.architecture import StageLayout
from ppserve.core.plan import Slice, StepPlan
from ppserve.model.backend import Backend
from ppserve.model.cpu.backend import CpuBackend
from ppserve.model.gpt2 import GPT2Stage
from ppserve.model.inputs import build_inputs
from tests.model.pipelines import GREEDY_DRAW
from tests.model.random_checkpoint import RandomCheckpoint, architecture
from tests.model.stock import StockBackend

WIDTH, VOCABULARY, PADDED_VOCABULARY, CONTEXT = 64, 1000, 1024, 40
MOST_TILE_ROWS = 32
"""Logits are computed in whole tiles."""


class NewTensors(TorchDispatchMode):
    """Those that operators make, views not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, operator: Callable[..., Any], types, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {_place(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = operator(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _place(leaf) not in given:
                self.bytes.append(leaf.untyped_storage().nbytes())
        return result


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Decoding:
    """A model in one stage, and a step for each number of rows."""

    def __init__(self, backend: Backend, num_layers: int) -> None:
        arch = architecture(width=WIDTH, num_layers=num_layers, vocab_size=VOCABULARY)
        self.layout = StageLayout(0, 1, 0, 2 * num_layers)
        self.model = GPT2Stage.load(RandomCheckpoint(arch), self.layout, backend)
        self.cache = backend.make_cache(arch, self.layout, 64 * 3, 16)

    def step(self, num_rows: int) -> None:
        tables = [tuple(range(3 * i, 3 * i + 3)) for i in range(num_rows)]
        slices = tuple(Slice(i, CONTEXT, (5,), table, GREEDY_DRAW) for i, table in enumerate(tables))
        inputs = build_inputs(StepPlan(0, 0, 0, slices), self.layout, self.cache)
        with torch.inference_mode():
            self.model.read_out(inputs, self.model.forward(inputs, None, self.cache))()

    def tensors(self, num_rows: int) -> list[int]:
        """Bytes of each that a step makes."""
        self.step(num_rows)
        with NewTensors() as made:
            self.step(num_rows)
        return made.bytes

    def peak(self, num_rows: int) -> int:
        """Bytes of Python's objects and numpy's arrays in the middle of a step, beyond those before it."""
        self.step(num_rows)
        tracemalloc.start()
        try:
            self.step(num_rows)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            self.step(num_rows)
            return tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_makes_tensors_for_hidden_states_and_logits_alone(dtype: str) -> None:
    shallow, deep = Decoding(CpuBackend(dtype), 2), Decoding(CpuBackend(dtype), 5)
    itemsize = getattr(torch, dtype).itemsize
    for num_rows in (1, 7, 64):
        made, more = shallow.tensors(num_rows), deep.tensors(num_rows)
        of_hidden, of_logits = WIDTH * num_rows * itemsize, 4 * PADDED_VOCABULARY * (num_rows + MOST_TILE_ROWS)
        assert sorted(more) == sorted([*made, *[of_hidden] * 2 * 3])  # what each sublayer gives
        assert len(made) <= 6 + 2 * 2
        assert sum(made) <= (5 + 2 * 2) * 4 * WIDTH * num_rows + of_logits


def test_layers_computed_by_operators_make_tensors_of_their_own() -> None:
    """The control: what the test above would see."""
    shallow, deep = (Decoding(StockBackend("float32"), num_layers) for num_layers in (2, 5))
    assert len(deep.tensors(1)) >= len(shallow.tensors(1)) + 3 * 8


def test_a_step_takes_little_memory_beside_tensors() -> None:
    decoding = Decoding(CpuBackend("float32"), 5)
    for num_rows in (1, 64):
        assert decoding.peak(num_rows) <= 16_000 + 512 * num_rows
