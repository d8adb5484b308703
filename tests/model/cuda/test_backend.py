"""The GPU's backend: what it says of itself, and how often it launches, copies and waits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ppserve.core.plan import Slice
from ppserve.model.cuda.backend import CudaBackend, DeviceOptions
from ppserve.model.cuda.graphs import RecordedStage
from ppserve.model.cuda.operators import Operators
from ppserve.model.selftest import check_determinism
from ppserve.model.stock import ACTIVATIONS
from tests.model.cuda.here import DEVICE, KINDS, device_of, operators_of
from tests.model.pipelines import CPU, GREEDY_DRAW, Pipeline, prompt
from tests.model.random_checkpoint import RandomCheckpoint, architecture

LAYERS = 4


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


# ---- launches ---------------------------------------------------------------------------------------------

# What only looks at a tensor in another way, or makes room for one, launches nothing.
VIEWS = {
    *("view", "_unsafe_view", "slice", "select", "split", "unbind", "expand", "transpose", "t", "permute"),
    *("detach", "alias", "unsqueeze", "squeeze", "flatten", "reshape", "as_strided"),
    *("empty", "new_empty", "empty_like", "new_empty_strided"),
    *("resolve_conj", "resolve_neg"),  # numpy asks for them
}
class Launches(TorchDispatchMode):
    """Counts operators. Those of `Operators` count as one each, as the kernels in their place are."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.within_operator = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = func.overloadpacket.__name__, func(*args, **kwargs or {})
        changes_nothing = args and result is args[0] and not name.endswith("_")
        if not self.within_operator and name not in VIEWS and not changes_nothing:
            self.counts[name] += 1
        return result

    @property
    def total(self) -> int:
        return sum(self.counts.values())

class CountedOperators:
    """One launch per operator, whatever it is made of here."""

    name = "counted"

    def __init__(self) -> None:
        self.launches: Launches | None = None
        self._inner = Operators()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operator = getattr(self._inner, name)

        def counted(*args: Any) -> Any:
            launches = self.launches
            if launches is None:
                return operator(*args)
            launches.counts[name] += 1
            launches.within_operator = True
            try:
                return operator(*args)
            finally:
                launches.within_operator = False

        return counted


def decodes(pipeline: Pipeline, count: int) -> list[Slice]:
    for i in range(count):
        pipeline.step([pipeline.slice(i, prompt(20 + i), 0)])
    return [pipeline.slice(i, (7,), 20 + i, GREEDY_DRAW) for i in range(count)]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_decode_takes_few_launches_a_layer(activation: str, batch_invariant: bool) -> None:
    """Without graphs, whatever the number of sequences."""
    operators = CountedOperators()
    options = DeviceOptions(batch_invariant, graphs=False)
    backend = CudaBackend(CPU, "float32", options, operators)  # type: ignore[arg-type]
    totals = {}
    for layers in (1, LAYERS):
        for count in (2, 9):
            arch = architecture(num_layers=layers, activation=activation)
            pipeline = Pipeline(RandomCheckpoint(arch), str(layers), backend=backend)
            slices = decodes(pipeline, count)
            copies, back = backend.staging.num_copies, backend.readback.num_copies
            waits = backend.accelerator.num_waits
            with Launches() as launches:
                operators.launches = launches
                pipeline.step(slices)
            operators.launches = None
            assert (backend.staging.num_copies - copies, backend.readback.num_copies - back) == (1, 1)
            assert backend.accelerator.num_waits == waits
            assert launches.counts["write"] == launches.counts["attend"] == layers
            totals[layers, count] = launches.total
    assert totals[1, 2] == totals[1, 9], "launches must not depend on the number of sequences"
    assert (totals[LAYERS, 2] - totals[1, 2]) / (LAYERS - 1) <= (14 if activation == "quick_gelu" else 12)
    assert totals[1, 2] <= 14 + 36, "embedding, head and drawing"


def test_a_recorded_decode_is_one_replay_and_two_copies(caplog: pytest.LogCaptureFixture) -> None:
    """And the log told of each that was being recorded, and of the memory that they took."""
    backend = CudaBackend(CPU, "float32", DeviceOptions(max_rows=8))
    pipeline = Pipeline(RandomCheckpoint(architecture(num_layers=2)), "2", backend=backend)
    with caplog.at_level("INFO", "ppserve.stage"):
        recorded = backend.recorded(pipeline.stages[0], pipeline.caches[0])
    each = [f"recording steps of {size} rows ({i} of 4)" for i, size in enumerate((8, 4, 2, 1), 1)]
    assert caplog.messages == [*each, "recorded steps of 1, 2, 4, 8 rows, in 0 MB"]
    assert isinstance(recorded, RecordedStage)
    pipeline.stages = [recorded]  # type: ignore[list-item]
    slices = decodes(pipeline, 5)
    replayed: list[int] = []
    for size, replay in recorded.replays.items():
        # What a replay does on a GPU is no launch of the host's.
        recorded.replays[size] = lambda size=size, replay=replay: replayed.append(size)  # type: ignore[misc]
    copies = backend.staging.num_copies
    with Launches() as launches:
        pipeline.step(slices)
    assert replayed == [8]
    assert backend.staging.num_copies == copies + 1
    assert launches.counts == {"copy_": 2}, "the inputs, and the tokens"
