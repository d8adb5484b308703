"""The GPU's backend: what it says of itself, and how often it launches, copies and waits."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ppserve.core.plan import Slice
from ppserve.model.cuda.backend import CudaBackend, DeviceOptions
from ppserve.model.cuda.device import Accelerator
from ppserve.model.cuda.graphs import RecordedStage
from ppserve.model.cuda.operators import Operators
from ppserve.model.selftest import check_determinism
from tests.model.cuda.here import DEVICE, KINDS, device_of, operators_of
from tests.model.pipelines import CPU, GREEDY_DRAW, Pipeline, prompt
from tests.model.random_checkpoint import RandomCheckpoint, architecture


def backend_of(operators: Operators | None = None, device: torch.device = DEVICE, **options: Any) -> CudaBackend:
    return CudaBackend(device, "float32", DeviceOptions(**options), operators)


class FeelsRows(Operators):
    """A product, attention, or sums over the vocabulary that do not keep the promise in steps of more than so many
    rows."""

    def __init__(
        self, product_above: float = math.inf, attention_above: float = math.inf, sums_above: float = math.inf
    ) -> None:
        self._product_above, self._attention_above = product_above, attention_above
        self._sums_above = sums_above

    def product(self, x_TK: torch.Tensor, *weights: Any) -> torch.Tensor:
        return super().product(x_TK, *weights) + 1e-6 * (len(x_TK) > self._product_above)

    def attend(self, qkv_TE: torch.Tensor, *rest: Any) -> torch.Tensor:
        return super().attend(qkv_TE, *rest) + 1e-6 * (len(qkv_TE) > self._attention_above)

    def running_sums(self, weights_RV: torch.Tensor) -> torch.Tensor:
        return super().running_sums(weights_RV) * (1 + 1e-15 * (len(weights_RV) > self._sums_above))


def test_the_selftest_tells_the_truth() -> None:
    """With the choice it passes on every stage, with as many rows as the largest step has."""
    checkpoint = RandomCheckpoint(architecture(width=64))
    for stage in Pipeline(checkpoint, "1,1", backend=backend_of(batch_invariant=True)).stages:
        assert check_determinism(stage) is None


@pytest.mark.parametrize(
    ("operators", "said"),
    [
        (FeelsRows(product_above=3), "the LM head: rows differ between 1 and 256 rows at once"),
        (FeelsRows(product_above=200), "the LM head: rows differ between 1 and 256 rows at once"),
        (FeelsRows(product_above=700), "a linear layer of 64 inputs: rows differ between 1 and 768 rows at once"),
        (
            FeelsRows(sums_above=200),
            "tokens or log-probabilities of the same logits differ between 1 and 256 rows at once",
        ),
        (
            FeelsRows(attention_above=700),
            "hidden states of a prompt in one step with others differ from the same prompt at once and alone",
        ),
    ],
)
def test_the_selftest_finds_what_feels_other_rows(operators: FeelsRows, said: str) -> None:
    """Also where only the largest steps do."""
    backend = backend_of(operators, CPU, batch_invariant=True)
    (stage,) = Pipeline(RandomCheckpoint(architecture(width=64)), "2", backend=backend).stages
    assert check_determinism(stage) == said


def test_the_selftest_asks_for_what_the_options_allow() -> None:
    assert backend_of(max_rows=300, max_step_rows=812).more_rows == (256, 300, 512, 812)
    assert backend_of(max_rows=300, max_step_rows=812).more_head_rows == (256, 300)
    assert backend_of(max_rows=4, max_step_rows=68).more_rows == ()
    assert backend_of(max_rows=4, max_step_rows=68).more_head_rows == (256,)


@pytest.mark.parametrize("kind", KINDS)
def test_descriptions_name_what_decides_the_bits(kind: str) -> None:
    operators = operators_of(kind)
    device = device_of(kind)
    plain, invariant = backend_of(operators, device), backend_of(operators, device, batch_invariant=True)
    assert operators.name in plain.describe()
    assert plain.describe() != invariant.describe()


class Launches(TorchDispatchMode):
    """Counts torch's operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


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
    """Without graphs; and a step copies twice, without a wait."""
    device = CountingCopies(CPU)
    backend = CudaBackend(CPU, "float32", DeviceOptions(batch_invariant, graphs=False), accelerator=device)
    counts = []
    for count in (2, 9):
        pipeline = Pipeline(RandomCheckpoint(architecture(num_layers=2)), "2", backend=backend)
        slices, copies = decodes(pipeline, count), device.num_copies
        with Launches() as launches:
            pipeline.step(slices)
        assert (device.num_copies - copies, device.num_waits) == (2, 0)
        counts.append(launches.counts)
    assert counts[0] == counts[1]


def test_a_recorded_decode_is_one_replay_and_two_copies(caplog: pytest.LogCaptureFixture) -> None:
    """And the log told of each that was being recorded."""
    device = CountingCopies(CPU)
    backend = CudaBackend(CPU, "float32", DeviceOptions(max_rows=8), accelerator=device)
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
    with Launches() as launches:
        pipeline.step(slices)
    assert replayed == [8]
    assert launches.counts["copy_"] == device.num_copies - copies == 2
    assert not {"mm", "addmm", "native_layer_norm", "add"} & launches.counts.keys()
