"""Costs of the model's parts: sensible, measured once, remembered, and never in the way of a start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ppserve.config import PipelineSettings, ServeConfig
from ppserve.core.architecture import Split, stage_layouts
from ppserve.core.cost_model import Coefficients, LayerCosts, StepSize
from ppserve.core.partition import PartCosts
from ppserve.core.plan import StepPlan
from ppserve.model.checkpoint import Checkpoint
from ppserve.model.checkpoint.opening import open_checkpoint
from ppserve.model.cuda.backend import DeviceOptions
from ppserve.stage import calibrate
from ppserve.stage.calibrate import ExpectedWorkload, costs_for_shape, layer_costs, step_costs
from ppserve.stage.device import Compute

pytestmark = pytest.mark.slow

COMPUTE = Compute(torch.device("cpu"), "float32", False, 1)


MIX = ExpectedWorkload(prompt=32, new=64)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ppserve"


def test_every_part_costs_something_and_is_remembered(cache: Path) -> None:
    costs = step_costs(open_checkpoint("tiny"), COMPUTE, MIX)
    assert costs.attention > 0
    assert costs.mlp > 0
    assert costs.head > 0
    assert costs.embedding >= 0
    (remembered,) = cache.glob("costs-*.json")
    # Another measurement would never give the same seconds to the last bit.
    assert step_costs(open_checkpoint("tiny"), COMPUTE, MIX) == costs
    step_costs(open_checkpoint("tiny"), COMPUTE, ExpectedWorkload(64, 16))
    assert len(list(cache.glob("costs-*.json"))) == 2
    assert remembered.exists()


def test_a_layer_and_the_head_cost_more_in_larger_steps(cache: Path) -> None:
    costs = layer_costs(open_checkpoint("tiny"), COMPUTE, MIX)
    one, many = (costs.layer.seconds(StepSize(rows, 48 * rows)) for rows in (1, 128))
    assert 0 < one < many
    assert costs.around_s > 0
    assert costs.ends_s >= 0
    assert 0 < costs.head.seconds(StepSize(sampled=1)) < costs.head.seconds(StepSize(sampled=64))
    assert layer_costs(open_checkpoint("tiny"), COMPUTE, MIX) == costs
    among_four = replace(COMPUTE, stages_here=4)
    assert layer_costs(open_checkpoint("tiny"), among_four, MIX) != costs
    shared = layer_costs(open_checkpoint("tiny"), COMPUTE, MIX, 2)
    assert shared.layer.seconds(StepSize(1, 48)) > 0
    assert len(list(cache.glob("costs-*.json"))) == 3


def test_what_computes_otherwise_is_measured_anew(cache: Path) -> None:
    """The GPU's operators in place of the CPU's, and products with fixed tiles in place of torch's."""
    reference = replace(COMPUTE, reference=True)
    invariant = replace(reference, options=DeviceOptions(batch_invariant=True))
    for number, compute in enumerate((COMPUTE, reference, invariant), 1):
        step_costs(open_checkpoint("tiny"), compute, MIX)
        assert len(list(cache.glob("costs-*.json"))) == number


@pytest.mark.parametrize("damage", ["", "{}", "[1, 2]", '{"attention": 1}'])
def test_a_damaged_memory_is_measured_again(cache: Path, damage: str) -> None:
    step_costs(open_checkpoint("tiny"), COMPUTE, MIX)
    (remembered,) = cache.glob("costs-*.json")
    remembered.write_text(damage)
    assert isinstance(step_costs(open_checkpoint("tiny"), COMPUTE, MIX), PartCosts)


def test_a_cache_that_cannot_be_written_is_done_without(cache: Path) -> None:
    cache.parent.joinpath("ppserve").write_text("a file where the directory should be")
    assert isinstance(step_costs(open_checkpoint("tiny"), COMPUTE, MIX), PartCosts)


@pytest.mark.parametrize(
    ("mix", "decodes", "prompts"),
    [
        (ExpectedWorkload(128, 128), 16, [(56, 16)]),
        (ExpectedWorkload(128, 64), 16, [(48, 32)]),
        (ExpectedWorkload(8, 128), 16, [(3, 1)]),
        (ExpectedWorkload(1, 256), 16, []),
        (ExpectedWorkload(32, 4), 16, [(0, 32)] * 4),
        (ExpectedWorkload(512, 16), 4, [(192, 128)]),
        (ExpectedWorkload(4000, 1), 1, [(447, 128)]),
    ],
)
def test_the_step_of_a_mix(mix: ExpectedWorkload, decodes: int, prompts: list[tuple[int, int]]) -> None:
    """Requests come as fast as they end, so a step has tokens of both in their ratio, up to a limit."""
    plan, share = mix.step(1024)
    found = [(s.start, len(s.token_ids)) for s in plan.slices]
    context = min(mix.prompt + mix.new // 2, 1023)
    assert found == [(context, 1)] * decodes + prompts
    # Of a prompt of 1023 and one token, 128 prompt tokens come with an eighth of a decode.
    assert share == pytest.approx(0.125 if mix.new == 1 else 1.0, rel=0.01)
    assert all(s.start + len(s.token_ids) <= 16 * len(s.block_table) for s in plan.slices)


def test_the_step_of_a_model_of_one_position() -> None:
    plan, _ = ExpectedWorkload(128, 128).step(1)
    assert {(s.start, len(s.token_ids)) for s in plan.slices} == {(0, 1)}


@pytest.mark.parametrize(
    ("num_ranks", "neighbours"), [(1, [2]), (2, [1, 0]), (3, [1, 0, 1]), (5, [1, 0, 1, 0, 0])]
)
def test_as_many_neighbours_as_head_and_callers(
    cache: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, neighbours: list[int]
) -> None:
    measured = []

    def fit(
        _of: Checkpoint, _on: Compute, _mix: ExpectedWorkload, num_tensor: int, num_neighbours: int
    ) -> LayerCosts:
        measured.append((num_tensor, num_neighbours))
        return LayerCosts(Coefficients(), Coefficients())

    monkeypatch.setattr(calibrate, "_fit", fit)
    config = ServeConfig(pipeline=PipelineSettings(parallel="auto"))
    compute = replace(COMPUTE, stages_here=num_ranks)

    def measure(local_rank: int) -> None:
        costs = costs_for_shape(config, 4, open_checkpoint("tiny"), compute, local_rank)
        assert costs is not None
        assert set(costs) == {1, 2, 4}

    for local_rank, number in enumerate(neighbours):
        for remembered in cache.glob("costs-*.json"):
            remembered.unlink()
        measure(local_rank)
        assert measured == [(count, number) for count in (1, 2, 4)]
        measured.clear()
        measure(local_rank)
        assert measured == [], "one reads what one like it has measured"
    other = min(1, num_ranks - 1)
    measure(other)
    assert len(measured) == (3 if neighbours[other] != neighbours[-1] else 0), "but not what one beside others has"


def test_quantities_are_measured_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever slows the machine for a while slows all of them. The first turn does not count."""
    monkeypatch.setattr(calibrate, "_TURNS_S", 0.0)
    order: list[str] = []

    def quantity(name: str) -> Callable[[], float]:
        return lambda: order.append(name) or float(len(order))

    plan = MIX.step(1024)[0]
    taken = calibrate._by_turns({(name, plan): quantity(name) for name in ("bare", "layers", "drawn")})
    assert order == ["bare", "layers", "drawn"] * (1 + calibrate._REPEATS)
    assert taken["layers", plan] == [2.0 + 3 * turn for turn in range(1, 1 + calibrate._REPEATS)]


def test_what_was_measured_is_what_is_predicted() -> None:
    """Steps of 8 rows cost far more than a line through smaller and larger ones says, and a turn in which all was
    twice as slow changes nothing."""
    layers_ms = {1: 0.8, 4: 1.2, 8: 2.4, 16: 3.4, 64: 12.5}
    heads_ms = {1: 0.4, 4: 0.4, 8: 0.6, 16: 0.8, 64: 1.7}
    taken: dict[tuple[str, StepPlan], list[float]] = {}
    for rows in layers_ms:
        plan = calibrate._plan([(96, 1)] * rows)
        whole_ms = 0.5 + layers_ms[rows]
        drawn_ms = whole_ms + heads_ms[rows]
        measured_ms = {"bare": 0.5, "layers": whole_ms, "drawn": drawn_ms, "lone": 0.9, "middle": 0.7}
        for kind, ms in measured_ms.items():
            taken[kind, plan] = [ms / 1e3, 2 * ms / 1e3, ms / 1e3]
    costs = calibrate._fitted(8, taken)
    assert (costs.around_s, costs.ends_s) == (0.7e-3, pytest.approx(0.2e-3))
    (whole,) = stage_layouts(Split.parse("8"))
    first, _ = stage_layouts(Split.parse("4,4"))
    for rows in layers_ms:
        size = StepSize(rows, 97 * rows, rows)
        assert costs.stage(whole).seconds(size) == pytest.approx((layers_ms[rows] + heads_ms[rows] + 0.2) / 1e3)
        assert costs.stage(first).seconds(size) == pytest.approx((layers_ms[rows] / 2 + 0.1) / 1e3)
        # A chunk of a prompt that is not its last: no row goes through the head.
        silent = replace(size, sampled=0)
        assert costs.stage(whole).seconds(silent) == pytest.approx((layers_ms[rows] + 0.2) / 1e3)
