"""Nothing that a device copies is used before it is there: steps on a device that does nothing unless it is waited
for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ppserve.core.plan import StepPlan
from ppserve.model.backend import StageModel
from ppserve.model.cuda.device import Readback, Staging
from ppserve.model.cuda.graphs import RecordedStage
from ppserve.model.inputs import KVCache, build_inputs
from tests.model.cuda.here import CPU as ON_CPU
from tests.model.cuda.late import LateDevice, late_backend
from tests.model.cuda.test_recorded import CHECKPOINT, Recorded, conversation
from tests.model.pipelines import Pipeline, prompt
from tests.stage.one_stage import plan


def numbers(first: int, count: int = 8) -> dict[str, np.ndarray]:
    return {"ids": np.arange(first, first + count, dtype=np.int32)}


def test_a_buffer_is_written_again_only_when_its_copy_has_read_it() -> None:
    """Many copies that nobody waits for, small and large."""
    device = LateDevice()
    staging = Staging(device)
    for count in (8, 300_000, 8, 8, 600_000, 8, 8, 8):
        assert staging.copy(numbers(count, count))["ids"].tolist() == list(range(count, 2 * count))
    assert device.num_waits == 5, "three copies are under way before the first wait"
    device.mark().wait()


def test_what_is_read_too_early_is_no_number() -> None:
    """The control of results: before its wait, a copy has brought nothing."""
    device = LateDevice()
    readback = Readback(device)
    drawn = StepPlan(0, 0, 0, plan(0, 0).slices)
    results = readback.reading(drawn, torch.tensor([[7.0]], dtype=torch.float64))
    assert readback._host[:8].view(torch.float64).isnan().all()
    assert results()[0][0].token_id == 7


@pytest.mark.parametrize("split", ["3", "1,2"])
def test_recorded_and_other_steps_draw_the_same(split: str) -> None:
    late = Pipeline(CHECKPOINT, split, backend=late_backend())
    both = zip(late.stages, late.caches, strict=True)
    late.stages = [stage.backend.recorded(stage, cache) for stage, cache in both]  # type: ignore[misc]
    exact = Recorded(8, split, device=ON_CPU)
    for ours, theirs in zip(conversation(late, 8), conversation(exact, 8), strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert ours[1] == theirs[1]


def test_steps_may_be_given_faster_than_they_are_done() -> None:
    """Prompts and recorded steps of a first stage, which nobody waits for."""
    backend = late_backend()
    pipeline = Pipeline(CHECKPOINT, "1,2", backend=backend)
    stage = backend.recorded(pipeline.stages[0], pipeline.caches[0])
    exact = Recorded(8, "1,2", device=ON_CPU)

    def forward(model: StageModel, cache: KVCache, number: int) -> torch.Tensor:
        ids = prompt(1 if number % 3 else 30, seed=number)
        step = StepPlan(0, number, 0, (pipeline.slice(number, ids, 0),))
        return model.forward(build_inputs(step, model.layout, cache), None)

    given = [forward(stage, pipeline.caches[0], number) for number in range(12)]
    for number, hidden_TD in enumerate(given):
        assert torch.equal(hidden_TD, forward(exact.stages[0], exact.caches[0], number))
    assert isinstance(stage, RecordedStage)
    assert stage.num_replays == 8
    assert backend.accelerator.num_waits == 13, "of 16 copies, recording's among them, three are under way"
    backend.accelerator.mark().wait()
