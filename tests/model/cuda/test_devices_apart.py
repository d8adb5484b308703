"""Nothing of the host's is mixed with the device's but in copies that nobody waits for: steps on torch's `meta`
device, which has shapes and no numbers, so that whatever would read one of them fails as well."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ppserve.core.plan import Slice, StepPlan
from ppserve.model.cuda.backend import CudaBackend, DeviceOptions
from ppserve.model.cuda.device import Accelerator
from ppserve.model.cuda.graphs import RecordedStage
from ppserve.model.cuda.operators import Operators
from ppserve.model.inputs import build_inputs
from tests.model.cuda.test_sampling import VOCABULARY, any_draw
from tests.model.pipelines import Pipeline, prompt
from tests.model.random_checkpoint import RandomCheckpoint, architecture

META = torch.device("meta")


class NoNumbers(Accelerator):
    """The device's side of copies has no numbers; those to the host bring none."""

    def __init__(self) -> None:
        super().__init__(META)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        assert {to.device.type, source.device.type} == {"cpu", "meta"}


class NothingKept(Operators):
    def write(self, *of: object) -> None:
        """The reference's reads which rows are kept."""


class Mixed(TorchDispatchMode):
    """Notes operators that take or give tensors of the host and of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        leaves = tree_leaves((args, kwargs, result))
        if len({of.device for of in leaves if isinstance(of, torch.Tensor)}) > 1:
            self.noted.append(str(func))
        return result


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("records", [False, True])
def test_steps_mix_nothing_of_the_host_with_the_device(records: bool, batch_invariant: bool) -> None:
    """Prompts, decodes, both, every kind of draw; recording and what was recorded."""
    options = DeviceOptions(batch_invariant, records, max_rows=16)
    backend = CudaBackend(META, "bfloat16", options, NothingKept(), NoNumbers())
    checkpoint = RandomCheckpoint(architecture(num_layers=2, vocab_size=VOCABULARY))
    pipeline = Pipeline(checkpoint, "1,1", backend=backend)
    chance, number = random.Random(3), range(12)
    draws = [any_draw(chance) for _ in number]
    prompts = [pipeline.slice(i, prompt(20 + i), 0, draws[i]) for i in number]
    decodes = [pipeline.slice(i, (7,), 20 + i, draws[i]) for i in number]
    with Mixed() as mixed:
        each = zip(pipeline.stages, pipeline.caches, strict=True)
        models = [backend.recorded(model, cache) for model, cache in each]
        assert isinstance(models[0], RecordedStage) == records
        for slices in (prompts, decodes, [*decodes[:5], *prompts[5:]]):
            run(models, pipeline, slices)
    assert mixed.noted == []


def run(models: list[Any], pipeline: Pipeline, slices: list[Slice]) -> None:
    plan, hidden_TD = StepPlan(0, 0, 0, tuple(slices)), None
    for model, cache in zip(models, pipeline.caches, strict=True):
        inputs = build_inputs(plan, model.layout, cache)
        hidden_TD = model.forward(inputs, hidden_TD)
    assert hidden_TD is not None
    assert hidden_TD.device == META
    model.read_out(inputs, hidden_TD)


def test_what_mixes_or_reads_is_seen() -> None:
    """The controls."""
    on_device = torch.empty(3, device=META)
    with Mixed() as mixed:
        on_device.copy_(torch.ones(3))
        on_device * torch.tensor(2.0)
    assert mixed.noted == ["aten.copy_.default", "aten.mul.Tensor"]
    with pytest.raises((RuntimeError, NotImplementedError)):
        on_device[0].item()
    with pytest.raises((RuntimeError, NotImplementedError)):
        on_device.nonzero()
