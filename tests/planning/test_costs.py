"""The costs that a server has measured: layers and head are told apart, and what is no such sheet is named."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ppserve.core.architecture import Architecture, Split, stage_layouts
from ppserve.core.cost_model import Coefficients, StepSize
from ppserve.core.ledger.steps import OverheadTimes
from ppserve.errors import ConfigError
from ppserve.planning.simulator import CostSheet, read_costs
from tests.core.test_architecture import GPT2, LLAMA_3_8B

OVERHEADS = OverheadTimes(1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3)
TRUTH = CostSheet(Coefficients(1e-3, 1e-4, 1e-8), Coefficients(5e-3, 0.0, 0.0, 4e-4), OVERHEADS, max_chunk=128)
SIZES = [StepSize(1, 10, 1), StepSize(8, 800, 8), StepSize(64, 2000, 0)]


def sheet(split: str, unsplit: float = 0.0, arch: Architecture = GPT2) -> dict[str, Any]:
    """As a server with TRUTH would say. unsplit: how much of the last stage's cost per sampled row was taken for
    cost per row."""
    stages = []
    for layout in stage_layouts(Split.parse(split)):
        cost = TRUTH.stage(arch, layout)
        moved = unsplit * cost.sample
        terms = replace(cost, row=cost.row + moved, sample=cost.sample - moved)
        named = {f"{term}_s": seconds for term, seconds in asdict(terms).items()}
        stages.append({"layers": layout.num_sublayers / 2, "steps": 1000, **named})
    return {"stages": stages, "tensor": 1, "max_chunk": 128, "overheads": asdict(OVERHEADS)}


def read(tmp_path: Path, content: object, arch: Architecture = GPT2) -> CostSheet:
    path = tmp_path / "costs.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_costs(path, arch)


@pytest.mark.parametrize("split", ["12", "9,3", "6,6", "4,4,4", "7.5,4.5", "4.5,3,4.5"])
@pytest.mark.parametrize("unsplit", [0.0, 0.4])
@pytest.mark.parametrize("arch", [GPT2, replace(LLAMA_3_8B, num_layers=12)], ids=["gpt2", "llama"])
def test_costs_of_layers_and_head_are_told_apart(
    tmp_path: Path, arch: Architecture, split: str, unsplit: float
) -> None:
    found = read(tmp_path, sheet(split, unsplit, arch), arch)
    assert (found.overheads, found.max_chunk, found.num_tensor) == (OVERHEADS, 128, 1)
    # A lone stage cannot tell its layers' fixed costs from the head's: it has the whole model, and so have these.
    for layout in stage_layouts(Split.parse("12" if split == "12" else "5,7")):
        for size in SIZES[: 2 if unsplit else 3]:
            drawn = replace(size, sampled=size.sampled * layout.is_last)
            expected = TRUTH.stage(arch, layout).seconds(drawn)
            assert found.stage(arch, layout).seconds(drawn) == pytest.approx(expected)


def test_tensor_ranks_have_their_share_of_the_weights() -> None:
    (whole,) = stage_layouts(Split.parse("12"))
    half = replace(whole, num_tensor=2)
    one, two = (TRUTH.stage(GPT2, layout).seconds(SIZES[1]) for layout in (whole, half))
    assert two == pytest.approx(one / 2, rel=0.01)
    of_two = replace(TRUTH, num_tensor=2)
    assert of_two.stage(GPT2, half) == TRUTH.stage(GPT2, whole), "such ranks were measured"
    with pytest.raises(ConfigError, match="--costs: it is of a server with 2 tensor ranks in each stage"):
        of_two.stage(GPT2, whole)


COST = {"layers": 6, "step_s": 1e-3, "row_s": 1e-4, "key_s": 1e-6, "sample_s": 1e-4, "steps": 1000}


@pytest.mark.parametrize("stage", [dict.fromkeys(COST, 0.0) | {"layers": 6, "steps": 1000}, COST | {"steps": 6}])
def test_a_sheet_of_a_server_that_computed_next_to_nothing(tmp_path: Path, stage: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"--costs: .*hardly a step: give it a load first"):
        read(tmp_path, sheet("6,6") | {"stages": [COST, stage]})


@pytest.mark.parametrize(
    ("odd", "problem"),
    [
        ({"overheads": {"send_s": 0.1}}, r"unknown field `send_s` - at `\$\.overheads`"),
        ({"overheads": {"head_s": -1e-3}}, r">= 0\.0 - at `\$\.overheads\.head_s`"),
        ({"stages": [COST | {"row_s": -1e-3}]}, r">= 0\.0 - at `\$\.stages\[0\]\.row_s`"),
    ],
)
def test_a_wrong_name_or_time_is_refused_with_its_place(tmp_path: Path, odd: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"--costs: .*costs\.json is no cost sheet: .*{problem}"):
        read(tmp_path, sheet("9,3") | odd)


@pytest.mark.parametrize(
    "odd",
    [
        *({"max_chunk": 0}, {"max_chunk": "many"}, {"tensor": 0}, {"tensor": None}),
        *({"overheads": 3}, {"overheads": {"head_s": "many"}}),
        *({"stages": []}, {"stages": 3}, {"stages": [3]}, {"stages": [{"layers": 1}]}),
        *({"stages": [COST | {"layers": layers}]} for layers in ("many", 1.25, 1e20, 10**400, float("nan"), 0)),
        *("", "[]", "{}", 100_000 * "["),
    ],
    ids=lambda odd: repr(odd)[:60],
)
def test_what_is_no_cost_sheet_is_named(tmp_path: Path, odd: dict[str, Any] | str) -> None:
    with pytest.raises(ConfigError, match=r"--costs: .*costs\.json is no cost sheet: [A-Z]\w+ "):
        read(tmp_path, sheet("9,3") | odd if isinstance(odd, dict) else odd)
