import json

import pytest

from tests.commands import run


def plan(*args: str) -> str:
    done = run("plan", *args)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_built_in_model():
    lines = plan("--stages", "2").splitlines()
    assert lines[0].startswith("tiny: ")
    assert lines[3].split()[0] == "0"
    assert lines[-1].startswith("predicted balance: decode ")


def test_all_three_dimensions_are_shown():
    shape = ["--stages", "2", "--tensor-parallel", "2", "--replicas", "2"]
    assert "2 tensor ranks x 2 stages x 2 replicas = 8 ranks" in plan(*shape).splitlines()[-1]
    found = json.loads(plan(*shape, "--json"))
    assert (found["tensor_parallel"], len(found["stages"]), found["replicas"]) == (2, 2, 2)


@pytest.fixture
def costs(tmp_path):
    """As a server with two stages of the built-in model would measure."""
    stage = {"layers": 4, "steps": 900, "step_s": 1e-3, "row_s": 1e-5, "key_s": 0.0, "sample_s": 0.0}
    names = ("head_s", "control_s", "prepare_s", "sending_s", "transfer_s", "return_s")
    sheet = {"stages": [stage] * 2, "tensor": 1, "max_chunk": 128, "overheads": dict.fromkeys(names, 1e-4)}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(sheet))
    return path


def test_costs_of_tensor_ranks_say_nothing_of_other_numbers(costs):
    costs.write_text(json.dumps(json.loads(costs.read_text()) | {"tensor": 2}))
    assert "simulated" in plan("--tensor-parallel", "2", "--costs", str(costs))
    for others in (["--tensor-parallel", "1"], ["--world", "2"]):
        done = run("plan", *others, "--costs", str(costs))
        assert "--costs: it is of a server with 2 tensor ranks in each stage" in done.one_line


def test_a_simulation(costs):
    output = plan("--stages", "2", "--costs", str(costs), "--replicas", "2", "--expect", "8,8,5")
    table = output.partition("simulated, a pipeline with 3 callers:\n")[2].splitlines()
    assert table[0].split()[0] == "requests"
    found = json.loads(plan("--stages", "2", "--costs", str(costs), "--expect", "8,8,4", "--json"))
    assert found["simulated"]["requests"] == 24
    assert len(found["simulated"]["stages"]) == 2


def test_all_shapes_of_a_world(costs):
    shapes = {"1x1x4", "1x2x2", "1x4x1", "2x1x2", "2x2x1", "4x1x1"}
    lines = plan("--world", "4").splitlines()
    assert {line.split()[0] for line in lines[1:-1]} == shapes
    found = json.loads(plan("--world", "4", "--costs", str(costs), "--expect", "8,8,16", "--json"))
    rates = [each["output_tokens_per_s"] for each in found]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 1000
    assert all(each["weight_bytes"] > 0 and each["balance"]["decode"] <= 1 for each in found)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--max-model-len", "1"], "--max-model-len: 1 has no room for a prompt and an answer"),
        (["--world", "4", "--stages", "2"], "--stages: --world compares all shapes"),
        (["--world", "4", "--stage-memory", "1M"], "--model: no shape of 4 ranks holds it"),
        (["--costs", __file__], "test_plan.py is no cost sheet: JSON is malformed"),
        (["--costs", "{costs}", "--kv-cache-memory", "1K"], "--kv-cache-memory: not one sequence of 1024 tokens"),
        *((wrong, wrong[0]) for wrong in (["--stages", "0"], ["--world", "100000"], ["--costs", "/no"])),
        *((wrong, wrong[0]) for wrong in (["--expect", "8,8"], ["--expect", "8,8,0"])),
    ],
)
def test_mistakes_are_named(args, problem, costs):
    done = run("plan", *(arg.format(costs=costs) for arg in args))
    assert done.returncode == 2
    assert problem in done.one_line
