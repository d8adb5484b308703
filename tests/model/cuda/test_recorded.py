"""Recorded steps: the tokens of steps that are computed as they come, whatever bucket a step is padded to. And
nothing that a device copies is used before it is there, if it does nothing unless it is waited for."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from ppserve.core.plan import Draw, Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.model.backend import Computing
from ppserve.model.cuda.backend import CudaBackend
from ppserve.model.cuda.cache import DeviceCache, DeviceInputs, bucket_sizes
from ppserve.model.cuda.device import Readback, Staging
from ppserve.model.cuda.graphs import RecordedStage
from ppserve.model.inputs import build_inputs
from tests.draws import a_draw
from tests.model.cuda.here import CPU, backend_of
from tests.model.cuda.late import LateDevice
from tests.model.pipelines import GREEDY_DRAW, Pipeline, prompt
from tests.model.random_checkpoint import RandomCheckpoint, architecture, llama
from tests.stage.one_stage import plan as one_row_plan

CHECKPOINT = RandomCheckpoint(architecture(num_layers=3))
LLAMA = RandomCheckpoint(llama(num_layers=3, qk_norms=True))
DRAWS = [
    GREEDY_DRAW,
    Draw(SamplingParams(seed=5, temperature=0.9)),
    Draw(SamplingParams(seed=6, top_k=9, top_p=0.8), num_logprobs=2),
    a_draw(SamplingParams(seed=7, logit_bias=((3, 4.0),)), banned=(5, 6)),
]


invariant = partial(backend_of, batch_invariant=True, max_rows=8)


class Recorded(Pipeline):
    """A pipeline whose stages are recorded after they are loaded."""

    def __init__(self, backend: CudaBackend, split: str = "3", checkpoint: RandomCheckpoint = CHECKPOINT) -> None:
        super().__init__(checkpoint, split, backend=backend)
        both = zip(self.stages, self.caches, strict=True)
        self.recorded = [backend.recorded(stage, cache) for stage, cache in both]
        self.stages = self.recorded  # type: ignore[assignment]

    @property
    def replays(self) -> list[int]:
        return [stage.num_replays for stage in self.recorded if isinstance(stage, RecordedStage)]


def plain(split: str = "3", checkpoint: RandomCheckpoint = CHECKPOINT) -> Pipeline:
    return Pipeline(checkpoint, split, backend=invariant(graphs=False))


def conversation(pipeline: Pipeline, count: int) -> list[object]:
    """Prompts of `count` sequences, then decodes of fewer and fewer of them, then a chunk among decodes."""
    prompts = {i: prompt(5 + 7 * i, seed=i) for i in range(count)}
    last, told = {}, []
    for i, ids in prompts.items():
        (drawn,) = pipeline.step([pipeline.slice(i, ids, 0, DRAWS[i % 4])])[1]
        last[i] = drawn.token_id
    for round_number in range(6):
        slices = [
            pipeline.slice(i, (last[i],), len(prompts[i]) + round_number, DRAWS[i % 4])
            for i in range(round_number % 2, count - round_number // 2)
            if len(prompts[i]) + round_number < 120
        ]
        if round_number == 4:
            slices.append(pipeline.slice(11, prompt(6, seed=9), 0, GREEDY_DRAW))
        hidden, drawn, _ = pipeline.step(slices)
        told.append((hidden.clone(), drawn))
        last |= {of.sequence_id: of.token_id or 0 for of in drawn}
        last = {i: last.get(i, 0) for i in range(count)}
    return told


@pytest.mark.parametrize(
    ("max_rows", "split", "checkpoint"),
    [
        *((1, "3", CHECKPOINT), (3, "1,2", CHECKPOINT), (8, "1.5,1.5", CHECKPOINT), (16, "3", CHECKPOINT)),
        (8, "1.5,1.5", LLAMA),
    ],
)
def test_padding_to_a_bucket_changes_no_token(max_rows: int, split: str, checkpoint: RandomCheckpoint) -> None:
    """It changes no bit of the hidden states either. Buckets hold all, some or none of the steps."""
    recorded = Recorded(invariant(max_rows=max_rows), split, checkpoint)
    expected = conversation(plain(split, checkpoint), 8)
    for ours, theirs in zip(conversation(recorded, 8), expected, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert ours[1] == theirs[1]
    assert all(count == (5 if max_rows >= 8 else 0) for count in recorded.replays)


def test_a_decode_without_a_draw_an_empty_bucket_and_a_scored_prompt() -> None:
    """A slice of one token that draws nothing is computed like the others; the smallest bucket may be all padding
    but one row. Scored prompts are computed as they come."""
    recorded, exact = Recorded(invariant()), plain()
    for pipeline in (recorded, exact):
        for i in range(3):
            pipeline.step([pipeline.slice(i, prompt(10, seed=i), 0)])

    def slices(pipeline: Pipeline) -> list[Slice]:
        return [pipeline.slice(i, (7,), 10, GREEDY_DRAW if i != 1 else None) for i in range(3)]

    assert recorded.step(slices(recorded))[1] == exact.step(slices(exact))[1]
    assert recorded.step([recorded.slice(0, (9,), 11)])[1] == ()
    assert recorded.replays == [2]
    scored = recorded.slice(3, (3,), 0, targets=(4,), num_prompt_logprobs=1)
    assert recorded.step([scored])[2] == exact.step([scored])[2]
    assert recorded.replays == [2]


def test_buckets_are_powers_of_two_and_the_most() -> None:
    assert [bucket_sizes(most) for most in (1, 2, 7)] == [(1,), (1, 2), (1, 2, 4, 7)]


# ---- a device that is late ---------------------------------------------------------------------------------


def test_a_buffer_is_written_again_only_when_its_copy_has_read_it() -> None:
    """Many copies that nobody waits for, small and large."""
    device = LateDevice()
    staging = Staging(device)
    for count in (8, 300_000, 8, 8, 600_000, 8, 8, 8):
        numbers = np.arange(count, 2 * count, dtype=np.int32)
        assert staging.copy({"ids": numbers})["ids"].tolist() == numbers.tolist()
    assert device.num_waits == 5, "three copies are under way before the first wait"
    device.mark().wait()


def test_what_is_read_too_early_is_no_number() -> None:
    """The control of results: before its wait, a copy has brought nothing."""
    device = LateDevice()
    readback = Readback(device)
    drawn = StepPlan(0, 0, 0, one_row_plan(0, 0).slices)
    results = readback.reading(drawn, torch.tensor([[7.0]], dtype=torch.float64))
    assert readback._host[:8].view(torch.float64).isnan().all()
    assert results()[0][0].token_id == 7


@pytest.mark.parametrize("split", ["3", "1,2"])
def test_recorded_and_other_steps_draw_the_same(split: str) -> None:
    late = invariant(CPU, accelerator=LateDevice())
    ours, theirs = (conversation(Recorded(backend, split), 8) for backend in (late, invariant(CPU)))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one[0], other[0])
        assert one[1] == other[1]


def test_steps_may_be_given_faster_than_they_are_done() -> None:
    """Prompts and recorded steps of a first stage, which nobody waits for. What it hands on stays as it is while
    the next steps are computed."""
    backend = invariant(CPU, accelerator=LateDevice())
    pipeline = Pipeline(CHECKPOINT, "1,2", backend=backend)
    stage = backend.recorded(pipeline.stages[0], pipeline.caches[0])
    exact = Recorded(invariant(CPU), "1,2")

    def forward(model: Computing[DeviceInputs], cache: DeviceCache, number: int) -> torch.Tensor:
        ids = prompt(1 if number % 3 else 30, seed=number)
        step = StepPlan(0, number, 0, (pipeline.slice(number, ids, 0),))
        return model.forward(build_inputs(step, pipeline.layouts[0], cache), None)

    given = [forward(stage, pipeline.caches[0], number) for number in range(12)]
    for number, hidden_TD in enumerate(given):
        assert torch.equal(hidden_TD, forward(exact.stages[0], exact.caches[0], number))
    assert isinstance(stage, RecordedStage)
    assert stage.num_replays == 8
    assert backend.accelerator.num_waits == 13, "of 16 copies, recording's among them, three are under way"
    backend.accelerator.mark().wait()
