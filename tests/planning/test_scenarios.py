import json
from dataclasses import asdict

import pytest

from ppserve.core.architecture import Architecture, Split, stage_layouts
from ppserve.core.cost_model import Coefficients, LayerCosts, StepSize
from ppserve.core.ledger.overheads import OverheadTimes
from ppserve.errors import ConfigError
from ppserve.planning.forecast import Intent, forecast
from ppserve.planning.machine import Device, Wires
from ppserve.planning.scenarios import (
    fixed_load,
    read_costs,
    render_outcomes,
    simulate,
    summary,
)

SMALL = Architecture(12, 768, 12, 1024, 50257, 50257, 3072)
CORE = Device(flops=50e9, memory_bandwidth=10e9, launch_s=1e-4)


def test_many_sequences_gain_from_stages_and_one_does_not():
    few, many = fixed_load(2, 16, 20, 1), fixed_load(96, 16, 20, 96)
    speed = {
        (name, stages): simulate(forecast(SMALL, Intent(stages)), CORE, Wires(), load, 256).output_tokens_per_s
        for stages in (1, 2)
        for name, load in (("few", few), ("many", many))
    }
    assert speed["few", 2] < speed["few", 1]
    assert speed["many", 2] > 1.5 * speed["many", 1]


def test_the_better_split_is_faster_in_decode():
    # enough memory traffic, little arithmetic: the case for which 9/3 is the answer
    device = Device(flops=1e15, memory_bandwidth=10e9, launch_s=0)
    load = fixed_load(8, 1, 60, 8)
    even, auto = (
        simulate(forecast(SMALL, Intent(2, layers=split)), device, Wires(), load, 64).output_tokens_per_s
        for split in (Split.parse("6,6"), Split.parse("9,3"))
    )
    assert auto / even == pytest.approx(0.97 / 0.76, rel=0.03)


def test_nothing_fits():
    plan = forecast(SMALL, Intent(1, kv_cache_memory=1))
    with pytest.raises(ConfigError, match="not one sequence of 1024 tokens fits"):
        simulate(plan, CORE, Wires(), fixed_load(1, 1, 1, 1), 1)


# ---- measured costs ---------------------------------------------------------------------------------------

LAYER = Coefficients(1e-3, 1e-4, 1e-8)
HEAD = Coefficients(5e-3, 0.0, 0.0, 4e-4)
TRUTH = LayerCosts(LAYER, HEAD)


def sheet(split: str, unsplit: float = 0.0) -> str:
    """unsplit: how much of the last stage's cost per sampled row was taken for cost per row."""
    stages = []
    for layout in stage_layouts(Split.parse(split)):
        truth = TRUTH.stage(layout)
        c, moved = truth.line, unsplit * truth.line.sample
        named = {"step_s": c.step + truth.head_s, "row_s": c.row + moved}
        named |= {"key_s": c.key, "sample_s": c.sample - moved}
        stages.append({"layers": layout.num_sublayers / 2, **named})
    return json.dumps({"stages": stages})


@pytest.mark.parametrize("split", ["9,3", "6,6", "4,4,4", "7.5,4.5", "4.5,3,4.5"])
@pytest.mark.parametrize("unsplit", [0.0, 0.4])
def test_costs_of_layers_and_head_are_told_apart(tmp_path, split, unsplit):
    (tmp_path / "costs.json").write_text(sheet(split, unsplit))
    found = read_costs(tmp_path / "costs.json")
    for layout in stage_layouts(Split.parse("5,7")):
        for rows, context, sampled in ((1, 10, 1), (8, 800, 8)):
            drawn = sampled if layout.is_last else 0
            expected = TRUTH.stage(layout).seconds(StepSize(rows, context, drawn))
            assert found.parts.stage(layout).seconds(StepSize(rows, context, drawn)) == pytest.approx(expected)


def test_what_surrounds_computing_is_read_too(tmp_path):
    times = OverheadTimes(1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3)
    sheet_with_overheads = json.loads(sheet("9,3")) | {"overheads": asdict(times)}
    (tmp_path / "costs.json").write_text(json.dumps(sheet_with_overheads))
    wires = read_costs(tmp_path / "costs.json").wires
    assert wires is not None
    assert (wires.head_s, wires.control_s, wires.prepare_s) == (1e-3, 2e-3, 3e-3)
    assert (wires.sending_s, wires.transfer_s(1000), wires.return_s) == (4e-3, 5e-3, 6e-3)
    (tmp_path / "costs.json").write_text(sheet("9,3"))
    assert read_costs(tmp_path / "costs.json").wires is None


def test_spread_and_chunk_of_a_cost_sheet(tmp_path):
    (tmp_path / "costs.json").write_text(sheet("9,3"))
    untold = read_costs(tmp_path / "costs.json")
    assert (untold.spread, untold.max_chunk) == (0.0, None)
    told = json.loads(sheet("9,3")) | {"max_chunk": 128}
    for stage, spread in zip(told["stages"], (0.1, 0.2), strict=True):
        stage["spread"] = spread
    (tmp_path / "costs.json").write_text(json.dumps(told))
    found = read_costs(tmp_path / "costs.json")
    assert found.spread == pytest.approx(0.15)
    assert found.max_chunk == 128


def test_the_costs_of_a_single_stage(tmp_path):
    (tmp_path / "costs.json").write_text(sheet("12"))
    found = read_costs(tmp_path / "costs.json")
    (whole,) = stage_layouts(Split.parse("12"))
    size = StepSize(8, 100, 8)
    assert found.parts.stage(whole).seconds(size) == pytest.approx(TRUTH.stage(whole).seconds(size))


def test_costs_of_tensor_ranks_are_those_of_such_ranks(tmp_path):
    """With all that they wait for each other: no gather is added."""
    times = OverheadTimes(1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3)
    told = json.loads(sheet("9,3")) | {"tensor": 2, "overheads": asdict(times)}
    (tmp_path / "costs.json").write_text(json.dumps(told))
    found = read_costs(tmp_path / "costs.json")
    assert found.tensor == 2
    assert found.shared == {2: found.parts}
    load = fixed_load(4, 8, 8, 1)
    told["tensor"] = 1
    (tmp_path / "costs.json").write_text(json.dumps(told))
    alone = read_costs(tmp_path / "costs.json")
    of_two, of_one = (
        simulate(forecast(SMALL, Intent(2, num_tensor=count)), costs, costs.wires, load, 8).wall_s
        for count, costs in ((2, found), (1, alone))
    )
    assert of_two == pytest.approx(of_one)


def test_a_topology_of_replicas_of_tensor_ranks(tmp_path):
    """Its stages are listed once for each replica."""
    stages = [
        {"replica": replica, "numLayers": layers, "measuredStepSeconds": 0.009, "ranks": [{}, {"tensor": 1}]}
        for replica in (0, 1)
        for layers in (9, 3)
    ]
    (tmp_path / "topology.json").write_text(json.dumps({"stages": stages}))
    found = read_costs(tmp_path / "topology.json")
    assert found.tensor == 2
    (first, _) = stage_layouts(Split.parse("9,3"))
    assert found.parts.stage(first).seconds(StepSize(1, 0, 0)) == pytest.approx(0.009)


@pytest.mark.parametrize("name", ["measuredStepSeconds", "measured_step_seconds"])
def test_a_topology_gives_steps_of_constant_time(tmp_path, name):
    layers = "numLayers" if name[0:9] == "measuredS" else "num_layers"
    stages = [{layers: 9, name: 0.009}, {layers: 3, name: 0.008}]
    (tmp_path / "topology.json").write_text(json.dumps({"stages": stages}))
    found = read_costs(tmp_path / "topology.json")
    first, last = stage_layouts(Split.parse("6,6"))
    assert found.parts.stage(first).seconds(StepSize(50, 0, 0)) == pytest.approx(0.006)
    assert found.parts.stage(last).seconds(StepSize(1, 0, 1)) == pytest.approx(0.006 + 0.005)


def test_a_topology_whose_stages_share_a_layer(tmp_path):
    """It counts that layer on both; its attention is a third of it."""
    stages = [
        {"numLayers": 8, "layers": "0-7a", "measuredStepSeconds": 0.0022},
        {"numLayers": 5, "layers": "7m-11", "measuredStepSeconds": 0.0024},
    ]
    (tmp_path / "topology.json").write_text(json.dumps({"stages": stages}))
    found = read_costs(tmp_path / "topology.json")
    first, last = stage_layouts(Split.parse("6,6"))
    assert found.parts.stage(first).seconds(StepSize(1, 0, 0)) == pytest.approx(0.0018)
    assert found.parts.stage(last).seconds(StepSize(1, 0, 1)) == pytest.approx(0.0018 + 0.0024 - 0.0003 * 14 / 3)


def test_a_sheet_of_a_server_that_computed_next_to_nothing(tmp_path):
    cost = {"layers": 6, "step_s": 1e-3, "row_s": 1e-4, "key_s": 1e-6, "sample_s": 1e-4}
    for stage in dict.fromkeys(cost, 0.0) | {"layers": 6}, cost | {"steps": 6}:
        (tmp_path / "costs.json").write_text(json.dumps({"stages": [cost, stage]}))
        with pytest.raises(ConfigError, match="hardly a step: give it a load first"):
            read_costs(tmp_path / "costs.json")


@pytest.mark.parametrize(
    "odd",
    [
        {"max_chunk": 0},
        {"max_chunk": "many"},
        {"tensor": 0},
        {"tensor": None},
        {"stages": [{"layers": "many", "measured_step_seconds": 1}]},
    ],
)
def test_a_sheet_with_odd_numbers(tmp_path, odd):
    (tmp_path / "costs.json").write_text(json.dumps(json.loads(sheet("9,3")) | odd))
    with pytest.raises(ConfigError, match=r"--costs: .*no cost sheet"):
        read_costs(tmp_path / "costs.json")


@pytest.mark.parametrize(
    "stages",
    [
        "[]",
        '[{"layers": 1}]',
        "[3]",
        "3",
        '[{"layers": NaN, "measured_step_seconds": 1}]',
        '[{"layers": 1.25, "measured_step_seconds": 1}]',
        '[{"layers": 1e20, "measured_step_seconds": 1}]',
        '[{"layers": 1' + "0" * 400 + ', "measured_step_seconds": 1}]',
    ],
)
def test_stages_that_are_none_are_named(tmp_path, stages):
    (tmp_path / "costs.json").write_text(f'{{"stages": {stages}}}')
    with pytest.raises(ConfigError, match=r"--costs: .*costs\.json"):
        read_costs(tmp_path / "costs.json")


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_what_is_no_cost_sheet_is_named(tmp_path, text):
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ConfigError, match=r"--costs: .*costs\.json"):
        read_costs(tmp_path / "costs.json")


# ---- reports ----------------------------------------------------------------------------------------------


def test_reports():
    outcomes = {n: simulate(forecast(SMALL, Intent(n)), CORE, Wires(), fixed_load(8, 8, 8, 4), 8) for n in (1, 2)}
    numbers = summary(outcomes[2])
    assert numbers["requests"] == 8
    for stage in numbers["stages"]:
        assert sum(stage.values()) == pytest.approx(1)
    lines = render_outcomes({n: summary(outcome) for n, outcome in outcomes.items()}).splitlines()
    assert lines[0].split() == ["stages", "1", "2"]
    assert [line.split()[0] for line in lines[9:16]] == [
        "busy", "fill_drain", "imbalance", "transfer", "token_return", "host",
        "gather",
    ]  # fmt: skip
    json.dumps(numbers)
