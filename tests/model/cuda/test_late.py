"""Nothing that a device copies is used before it is there: steps on a device that does nothing unless it is waited
for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ppserve import wire
from ppserve.core.architecture import Split, stage_layouts
from ppserve.core.plan import Slice, StepPlan
from ppserve.model.backend import KVCache, StageModel
from ppserve.model.cuda.graphs import RecordedStage
from ppserve.model.cuda.inputs import Buckets
from ppserve.model.cuda.transfers import Readback, Staging
from ppserve.model.inputs import build_inputs
from ppserve.stage.wiring import ThreadWiring
from tests.model.cuda.here import CPU as ON_CPU
from tests.model.cuda.late import LateCompute, LateDevice, WrittenTooEarly, late_backend
from tests.model.cuda.test_recorded import CHECKPOINT, Recorded, conversation
from tests.model.pipelines import GREEDY_DRAW, Pipeline, prompt
from tests.model.random_checkpoint import architecture
from tests.stage.one_stage import CPU, plan, stages


def numbers(first: int, count: int = 8) -> dict[str, np.ndarray]:
    return {"ids": np.arange(first, first + count, dtype=np.int32)}


def test_a_buffer_is_written_again_only_when_its_copy_has_read_it() -> None:
    """Many copies that nobody waits for, small and large."""
    device = LateDevice()
    staging = Staging(device)
    for count in (8, 100_000, 8, 8, 200_000, 8, 8, 8):
        assert staging.copy_new(numbers(count, count))["ids"].tolist() == list(range(count, 2 * count))
    assert device.num_waits == 5, "three copies are under way before the first wait"
    device.mark().wait()


def test_all_room_for_recorded_steps_is_there_before_the_first() -> None:
    """The host waits while memory is pinned. Here the arrays of a step are 128 KiB."""

    class Counting(LateDevice):
        num_buffers = 0

        def host_buffer(self, num_bytes: int) -> torch.Tensor:
            self.num_buffers += 1
            return super().host_buffer(num_bytes)

    device = Counting()
    staging = Staging(device)
    (layout,) = stage_layouts(Split.parse("1"))
    buckets = Buckets((1, 256), architecture(max_positions=2048), layout, 16, staging)
    begun_with = device.num_buffers
    for _ in range(4):
        buckets.put({"tables": np.zeros(256 * 128, np.int32)})
    assert device.num_buffers == begun_with


def test_what_is_written_too_early_is_seen() -> None:
    """The control: a host that does not wait."""

    class Impatient(Staging):
        def _host_buffer(self, num_bytes: int) -> torch.Tensor:
            self._under_way.rotate()
            return self._under_way[0][1] if len(self._under_way) > 1 else super()._host_buffer(num_bytes)

    device = LateDevice()
    staging = Impatient(device)
    for first in range(4):
        staging.copy_new(numbers(first))
    with pytest.raises(WrittenTooEarly):
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
        return model.forward(build_inputs(step, model.layout, cache), None, cache)

    given = [forward(stage, pipeline.caches[0], number) for number in range(12)]
    for number, hidden_TD in enumerate(given):
        assert torch.equal(hidden_TD, forward(exact.stages[0], exact.caches[0], number))
    assert isinstance(stage, RecordedStage)
    assert stage.num_replays == 8
    assert backend.accelerator.num_waits == 10, "of 13 copies, recording's among them, three are under way"
    backend.accelerator.mark().wait()


@pytest.mark.parametrize("split", ["3", "1.5,1.5"])
def test_the_loop_draws_what_the_model_draws(split: str) -> None:
    """Two lanes: a stage has the next plan of one before its step of the other has ended."""
    prompts, count = ((1, 2, 3), (4, 5)), 5
    expected = [[drawn.token_id for drawn in Pipeline(CHECKPOINT, "3").generate(ids, count)] for ids in prompts]
    tokens: list[list[int]] = [[], []]

    def next_plan(step_id: int) -> StepPlan:
        slot = step_id % 2
        ids = tokens[slot][-1:] or prompts[slot]
        start = len(prompts[slot]) + len(tokens[slot]) - len(ids) if tokens[slot] else 0
        return StepPlan(1, step_id, 0, (Slice(slot, start, tuple(ids), (2 * slot, 2 * slot + 1), GREEDY_DRAW),))

    with stages(split, ThreadWiring(), CHECKPOINT, compute=LateCompute.like(CPU)) as pipeline:
        for stage in pipeline:
            stage.form(1)
        for stage in pipeline:
            stage.hear(wire.Ready)
        for step_id in range(2 * count + 2):
            if step_id >= 2:
                drawn = [stage.hear(wire.Result).result for stage in pipeline][-1].drawn
                tokens[step_id % 2].append(drawn[0].token_id)
            if step_id < 2 * count:
                for stage in pipeline:
                    stage.tell(wire.Plan(next_plan(step_id)))
    assert tokens == expected
