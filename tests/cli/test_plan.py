import json

import pytest
from click.testing import CliRunner

from ppserve.cli.main import cli
from ppserve.cli.plan import load_of
from ppserve.errors import PpserveError
from ppserve.planning.simulator import SimulatedRequest

CONFIG_13B = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_layer": 40,
    "n_embd": 5120,
    "n_head": 40,
    "n_positions": 2048,
    "n_inner": 20480,
    "vocab_size": 50257,
    "activation_function": "gelu",
}


def plan(*args: str) -> str:
    result = CliRunner().invoke(cli, ["plan", *args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_built_in_model():
    lines = plan("--stages", "2").splitlines()
    assert lines[0].startswith("tiny: ")
    assert lines[3].split()[0] == "0"
    assert lines[-1].startswith("predicted balance: decode ")


def test_a_13b_shaped_config_without_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_13B))
    sizes = ["--layers", "5,5,5,5,5,5,5,5", "--kv-cache-memory", "8G"]
    found = json.loads(plan("--model", str(tmp_path), "--stages", "8", *sizes, "--dtype", "bfloat16", "--json"))
    assert found["parameters"] == pytest.approx(12.85e9, rel=1e-3)
    assert found["split"] == [5] * 8
    assert found["stages"][1]["layers"] == "5-9"
    assert {stage["kv_bytes_per_token"] for stage in found["stages"]} == {5 * 2 * 5120 * 2}
    assert found["max_sequences"] == (8 << 30) // (5 * 2 * 5120 * 2) // 2048


def test_all_three_dimensions_are_shown():
    shape = ["--stages", "2", "--tensor-parallel", "2", "--replicas", "2"]
    assert "2 tensor ranks x 2 stages x 2 replicas = 8 ranks" in plan(*shape).splitlines()[-1]
    found = json.loads(plan(*shape, "--json"))
    assert (found["tensor_parallel"], len(found["stages"]), found["replicas"]) == (2, 2, 2)


def test_more_tensor_ranks_than_heads_are_refused():
    with pytest.raises(PpserveError, match="--tensor-parallel: 64 is more than the model's"):
        plan("--tensor-parallel", "64")


def test_costs_of_tensor_ranks_say_nothing_of_other_numbers(tmp_path):
    stage = {"layers": 4, "step_s": 1e-3, "row_s": 0.0, "key_s": 0.0, "sample_s": 0.0}
    (tmp_path / "costs.json").write_text(json.dumps({"stages": [stage], "tensor": 2}))
    of_two = ("--costs", str(tmp_path / "costs.json"), "--simulate", "--requests", "2", "--expect-new", "2")
    assert "simulated:" in plan("--tensor-parallel", "2", *of_two)
    for others in (["--tensor-parallel", "1"], ["--world", "2"]):
        with pytest.raises(PpserveError, match="is of a server with 2 tensor ranks in each stage"):
            plan(*others, *of_two)


def test_speeds_and_times_beside_costs_that_have_them_are_refused(tmp_path):
    stage = {"layers": 8, "step_s": 1e-3, "row_s": 0.0, "key_s": 0.0, "sample_s": 0.0}
    names = ("head_s", "control_s", "prepare_s", "sending_s", "transfer_s", "return_s")
    sheet = {"stages": [stage], "overheads": dict.fromkeys(names, 1e-4)}
    (tmp_path / "costs.json").write_text(json.dumps(sheet))
    simulated = ("--simulate", "--costs", str(tmp_path / "costs.json"), "--requests", "2", "--expect-new", "4")
    for flag, value in (("--flops", "1T"), ("--head-time", "1us")):
        with pytest.raises(PpserveError, match=f"{flag}: the sheet of --costs has it"):
            plan(*simulated, flag, value)
    # What ranks wait for each other, a server without tensor ranks cannot tell.
    slow, fast = (
        json.loads(plan(*simulated, "--json", "--tensor-parallel", "2", "--gather-latency", gather))["simulated"]
        for gather in ("1ms", "1us")
    )
    assert slow["1"]["output_tokens_per_s"] < 0.5 * fast["1"]["output_tokens_per_s"]


def test_a_simulation_beside_one_stage():
    output = plan("--stages", "2", "--simulate", "--compare", "1", "--requests", "6", "--expect-new", "8")
    table = output.partition("simulated:\n")[2].splitlines()
    assert table[0].split() == ["stages", "1", "2"]


def test_a_recorded_load_is_cut_to_the_context_and_sped_up(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,5000,109\n2023-11-16 18:15:51.6805900,1000,0\n"
    )
    flags = {"trace": trace, "requests": 10, "time_scale": 2.0}
    load = load_of(1024, flags)
    assert load.concurrency is None
    assert load.requests[0] == SimulatedRequest(0.0, 374, 44)
    assert (load.requests[1].prompt_tokens, load.requests[1].new_tokens) == (1024 - 109, 109)
    assert load.requests[2] == SimulatedRequest(pytest.approx(2.5), 1000, 1)
    assert len(load_of(1024, flags | {"requests": 2}).requests) == 2
    output = plan("--simulate", "--trace", str(trace), "--requests", "2")
    assert "simulated:" in output


def test_a_simulation_as_json():
    speeds = ["--flops", "312T", "--memory-bandwidth", "2TB/s", "--link-latency", "5us", "--launch-time", "20e-6"]
    found = json.loads(plan("--stages", "2", "--simulate", "--requests", "4", "--json", *speeds))
    assert found["simulated"]["2"]["requests"] == 4
    assert len(found["simulated"]["2"]["stages"]) == 2


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--stages", "9"], "9 stages cannot share 8 layers"),
        (["--stages", "2", "--layers", "7,7"], "adds up to 14"),
        (["--model", "/nonexistent/model"], "nonexistent"),
        (["--max-model-len", "99999"], "--max-model-len"),
        (["--world", "4", "--stages", "2"], "--stages: --world compares all shapes"),
        (["--world", "4", "--layers", "auto"], "--layers: --world compares all shapes"),
        (["--costs", __file__], "--costs: is of a simulation: add --simulate"),
        (["--compare", "1,2"], "--compare: is of a simulation: add --simulate"),
        (["--simulate", "--time-scale", "2"], "--time-scale: is of a --trace"),
        (["--simulate", "--trace", __file__, "--concurrency", "4"], "--concurrency: --trace has its own arrivals"),
        (["--simulate", "--max-model-len", "1"], "--max-model-len: 1 has no room for a prompt and an answer"),
    ],
)
def test_mistakes_are_named(args, problem):
    with pytest.raises(PpserveError, match=problem):
        CliRunner().invoke(cli, ["plan", *args], catch_exceptions=False, standalone_mode=False)


@pytest.mark.parametrize(
    "args",
    [
        ["--flops", "many"],
        ["--flops", "0"],
        ["--flops", "1e-300"],
        ["--flops", "٣T"],
        ["--launch-time", "1e999"],
        ["--link-latency", "5 parsecs"],
        ["--stages", "0"],
        ["--world", "100000"],
    ],
)
def test_flags_that_are_no_quantities(args):
    result = CliRunner().invoke(cli, ["plan", *args])
    assert result.exit_code == 2
    assert args[0] in result.output
