"""A stage's sublayers in one call of the kernels, as servers run them."""

from __future__ import annotations

import pytest
import torch

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.core.plan import Slice, StepPlan
from ppserve.model.cpu.backend import CpuBackend
from ppserve.model.decoder import load_stage
from ppserve.model.inputs import build_inputs
from tests.model.random_checkpoint import RandomCheckpoint

ARCH = Architecture(3, 48, 4, 64, 211, 211, 192)
FIRST, ALL = (1, 4), (0, 6)
"""Stages, by their first sublayer and how many: one that begins and ends within a layer, and the whole model."""


@pytest.mark.parametrize("sublayers", [FIRST, ALL])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("precision", [("float32", "none"), ("bfloat16", "none"), ("float32", "int8")])
def test_one_call_computes_what_a_call_for_each_sublayer_does(
    precision: tuple[str, str], threads: int, sublayers: tuple[int, int]
) -> None:
    dtype, quantization = precision
    backend = CpuBackend(dtype, threads, quantization)
    layout = StageLayout(0 if sublayers == ALL else 1, 1 if sublayers == ALL else 3, *sublayers)
    model = load_stage(RandomCheckpoint(ARCH), layout, backend)
    seen = []
    for joins in (False, True):
        cache = backend.make_cache(ARCH, layout, 16, 4)
        stage = backend.recorded(model, cache) if joins else model
        assert (stage is model) == (not joins)
        for start, count in ((0, 7), (7, 1), (8, 1)):
            slices = tuple(Slice(i, start, (11 + i,) * count, tuple(range(4 * i, 4 * i + 4))) for i in range(3))
            received_TD = torch.linspace(-2, 2, 3 * count * 48).view(-1, 48).to(backend.precision.hidden)
            inputs = build_inputs(StepPlan(0, 0, 0, slices), layout, cache)
            seen.append(stage.forward(inputs, None if layout.is_first else received_TD).clone())
            assert torch.equal(received_TD, torch.linspace(-2, 2, 3 * count * 48).view(-1, 48).to(received_TD))
    for apart, joined in zip(seen[:3], seen[3:], strict=True):
        assert torch.equal(apart, joined)
        assert apart.isfinite().all()
