"""The GPU's backend: what it says of itself, and how often it launches, copies and waits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ppserve.core.plan import Slice, StepPlan
from ppserve.model.cuda.backend import CudaBackend, DeviceOptions
from ppserve.model.cuda.device import Accelerator
from ppserve.model.cuda.graphs import RecordedStage
from ppserve.model.cuda.operators import Operators
from ppserve.model.inputs import build_inputs
from ppserve.model.selftest import check_determinism
from tests.model.cuda.here import KINDS, Calls, backend_of, device_of, operators_of
from tests.model.cuda.test_sampling import VOCABULARY, any_draw
from tests.model.pipelines import CPU, GREEDY_DRAW, Pipeline, prompt
from tests.model.random_checkpoint import RandomCheckpoint, architecture


class FeelsRows(Operators):
    """One operator does not keep the promise in steps of more than so many rows."""

    def __init__(self, operator: str, above: int) -> None:
        self._operator, self._above = operator, above

    def _error(self, operator: str, rows: torch.Tensor) -> float:
        return 1e-6 * (operator == self._operator and len(rows) > self._above)

    def product(self, x_TK: torch.Tensor, *weights: Any) -> torch.Tensor:
        return super().product(x_TK, *weights) + self._error("product", x_TK)

    def attend(self, qkv_TE: torch.Tensor, *rest: Any) -> torch.Tensor:
        return super().attend(qkv_TE, *rest) + self._error("attend", qkv_TE)

    def running_sums(self, weights_RV: torch.Tensor) -> torch.Tensor:
        return super().running_sums(weights_RV) * (1 + 1e-9 * self._error("running_sums", weights_RV))


def test_the_selftest_tells_the_truth() -> None:
    """It passes with that choice on every stage, with as many rows as the largest step has."""
    checkpoint = RandomCheckpoint(architecture(width=64))
    for stage in Pipeline(checkpoint, "1,1", backend=backend_of(batch_invariant=True)).stages:
        assert check_determinism(stage) is None


@pytest.mark.parametrize(
    ("operators", "said"),
    [
        (FeelsRows("product", 3), "the LM head: rows differ between 1 and 256 rows at once"),
        (FeelsRows("product", 200), "the LM head: rows differ between 1 and 256 rows at once"),
        (FeelsRows("product", 700), "a linear layer of 64 inputs: rows differ between 1 and 768 rows at once"),
        (
            FeelsRows("running_sums", 200),
            "tokens or log-probabilities of the same logits differ between 1 and",
        ),
        (
            FeelsRows("attend", 700),
            "hidden states of a prompt in one step with others differ from the same",
        ),
    ],
)
def test_the_selftest_finds_what_feels_other_rows(operators: FeelsRows, said: str) -> None:
    """It finds that even if only the largest steps feel them."""
    backend = backend_of(CPU, operators, batch_invariant=True)
    (stage,) = Pipeline(RandomCheckpoint(architecture(width=64)), "2", backend=backend).stages
    assert (check_determinism(stage) or "").startswith(said)


def test_the_selftest_asks_for_what_the_options_allow() -> None:
    assert backend_of(max_rows=300, max_step_rows=812).more_rows == (256, 300, 512, 812)
    assert backend_of(max_rows=300, max_step_rows=812).more_head_rows == (256, 300)
    assert backend_of(max_rows=4, max_step_rows=68).more_rows == ()
    assert backend_of(max_rows=4, max_step_rows=68).more_head_rows == (256,)


@pytest.mark.parametrize("kind", KINDS)
def test_descriptions_name_what_decides_the_bits(kind: str) -> None:
    operators = operators_of(kind)
    device = device_of(kind)
    plain, invariant = backend_of(device, operators), backend_of(device, operators, batch_invariant=True)
    assert operators.name in plain.describe()
    assert plain.describe() != invariant.describe()


class CountingCopies(Accelerator):
    num_copies = 0

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.num_copies += 1
        super().copy(to, source)


def decodes(pipeline: Pipeline, count: int) -> list[Slice]:
    for i in range(count):
        pipeline.step([pipeline.slice(i, prompt(20 + i), 0)])
    return [pipeline.slice(i, (7,), 20 + i, GREEDY_DRAW) for i in range(count)]


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_launches_do_not_depend_on_the_number_of_sequences(batch_invariant: bool) -> None:
    """Nothing is recorded here; and a step copies twice, without a wait."""
    device = CountingCopies(CPU)
    backend = backend_of(CPU, accelerator=device, batch_invariant=batch_invariant, graphs=False)
    counts = []
    for count in (2, 9):
        pipeline = Pipeline(RandomCheckpoint(architecture(num_layers=2)), "2", backend=backend)
        slices, copies = decodes(pipeline, count), device.num_copies
        with Calls() as calls:
            pipeline.step(slices)
        assert (device.num_copies - copies, device.num_waits) == (2, 0)
        counts.append(calls.counts)
    assert counts[0] == counts[1]


def test_a_recorded_decode_is_one_replay_and_two_copies(caplog: pytest.LogCaptureFixture) -> None:
    """The log tells of each that is being recorded."""
    device = CountingCopies(CPU)
    backend = backend_of(CPU, accelerator=device, max_rows=8)
    pipeline = Pipeline(RandomCheckpoint(architecture(num_layers=2)), "2", backend=backend)
    with caplog.at_level("INFO", "ppserve.stage"):
        recorded = backend.recorded(pipeline.stages[0], pipeline.caches[0])
    each = enumerate((8, 4, 2, 1), 1)
    assert caplog.messages == [f"recording steps of {size} rows ({i} of 4)" for i, size in each]
    assert isinstance(recorded, RecordedStage)
    pipeline.stages = [recorded]  # type: ignore[list-item]
    slices, copies, replayed = decodes(pipeline, 5), device.num_copies, list[int]()
    for size, replay in recorded.replays.items():
        # What a replay does on a GPU is no launch of the host's.
        recorded.replays[size] = lambda size=size, replay=replay: replayed.append(size)  # type: ignore[misc]
    with Calls() as calls:
        pipeline.step(slices)
    assert replayed == [8]
    assert calls.counts["copy_"] == device.num_copies - copies == 2
    assert not {"mm", "addmm", "native_layer_norm", "add"} & calls.counts.keys()


# ---- nothing of the host's is mixed with the device's but in copies that nobody waits for

META = torch.device("meta")
"""It has shapes and no numbers, so that whatever would read one of them fails as well."""


class NoNumbers(Accelerator):
    """The device's side of copies has no numbers; those to the host bring none."""

    def __init__(self) -> None:
        super().__init__(META)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        assert {to.device.type, source.device.type} == {"cpu", "meta"}


class NothingKept(Operators):
    def write(self, *of: object) -> None:
        """The reference's reads which rows are kept."""


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
    with Calls() as calls:
        each = zip(pipeline.stages, pipeline.caches, strict=True)
        models = [backend.recorded(model, cache) for model, cache in each]
        assert isinstance(models[0], RecordedStage) == records
        for slices in (prompts, decodes, [*decodes[:5], *prompts[5:]]):
            plan, hidden_TD = StepPlan(0, 0, 0, tuple(slices)), None
            for model, cache in zip(models, pipeline.caches, strict=True):
                inputs = build_inputs(plan, model.layout, cache)
                hidden_TD = model.forward(inputs, hidden_TD)
            assert hidden_TD is not None
            assert hidden_TD.device == META
            model.read_out(inputs, hidden_TD)
    assert calls.mixed == []


def test_what_mixes_or_reads_is_seen() -> None:
    """The controls."""
    on_device = torch.empty(3, device=META)
    with Calls() as calls:
        on_device.copy_(torch.ones(3))
        on_device * torch.tensor(2.0)
    assert calls.mixed == ["copy_", "mul"]
    with pytest.raises((RuntimeError, NotImplementedError)):
        on_device[0].item()
    with pytest.raises((RuntimeError, NotImplementedError)):
        on_device.nonzero()
