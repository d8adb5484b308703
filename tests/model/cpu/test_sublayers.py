"""A stage's sublayers in one call of the kernels, as servers run them."""

from __future__ import annotations

import pytest
import torch

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.core.plan import Slice, StepPlan
from ppserve.model.cpu.backend import CpuBackend
from ppserve.model.decoder import Block, load_stage
from ppserve.model.inputs import build_inputs
from tests.architectures import gpt2 as gpt2_architecture
from tests.model.random_checkpoint import RandomCheckpoint, llama

ARCH = gpt2_architecture(3, 48, 4, 64, 211, 211, 192)
MIDDLE, WHOLE = StageLayout(1, 3, 1, 4), StageLayout(0, 1, 0, 6)
"""A stage that begins and ends within a layer, and the model in one stage."""


@pytest.mark.parametrize("layout", [MIDDLE, WHOLE], ids=["middle", "whole"])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", "none"), ("bfloat16", "none"), ("float32", "int8")]
)
def test_one_call_computes_what_a_call_for_each_sublayer_does(
    dtype: str, quantization: str, threads: int, layout: StageLayout
) -> None:
    backend = CpuBackend(dtype, threads, quantization)
    model = load_stage(RandomCheckpoint(ARCH), layout, backend)
    apart_cache, cache = (backend.make_cache(ARCH, layout, 16, 4) for _ in range(2))
    assert len(model.calls) == 1
    of_each = model.computing(*model.sublayers)
    for start, count in ((0, 7), (7, 1), (8, 1)):
        slices = tuple(Slice(i, start, (11 + i,) * count, tuple(range(4 * i, 4 * i + 4))) for i in range(3))
        plan = StepPlan(0, 0, 0, slices)
        received_TD = torch.linspace(-2, 2, 3 * count * 48).view(-1, 48).to(backend.precision.hidden)
        before_TD, given_TD = received_TD.clone(), None if layout.is_first else received_TD
        apart = of_each.forward(build_inputs(plan, layout, apart_cache), given_TD)
        assert torch.equal(model.forward(build_inputs(plan, layout, cache), given_TD), apart)
        assert apart.isfinite().all()
        assert torch.equal(received_TD, before_TD)


@pytest.mark.parametrize("layout", [MIDDLE, WHOLE], ids=["middle", "whole"])
@pytest.mark.parametrize("arch", [ARCH, llama(num_layers=3, qk_norms=True)], ids=["gpt2", "llama"])
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("float32", "none"), ("bfloat16", "none"), ("float32", "int8"), ("float32", "int4")],
)
def test_a_fused_block_has_the_bits_of_its_two_lines(
    dtype: str, quantization: str, arch: Architecture, layout: StageLayout
) -> None:
    backend = CpuBackend(dtype, 2, quantization)
    fused = load_stage(RandomCheckpoint(arch), layout, backend)
    assert not any(isinstance(block, Block) for block in fused.calls)
    plain = fused.computing(*fused.blocks)
    caches = [backend.make_cache(arch, layout, 16, 4) for _ in range(2)]
    for start, count in ((0, 7), (7, 1), (8, 1)):
        slices = tuple(Slice(i, start, (11 + i,) * count, tuple(range(4 * i, 4 * i + 4))) for i in range(3))
        received_TD = torch.linspace(-2, 2, 3 * count * 48).view(-1, 48).to(backend.precision.hidden)
        given_TD = None if layout.is_first else received_TD
        inputs = [build_inputs(StepPlan(0, 0, 0, slices), layout, cache) for cache in caches]
        found = [model.forward(each, given_TD) for model, each in zip((fused, plain), inputs, strict=True)]
        assert torch.equal(*found)
        assert found[0].isfinite().all()
