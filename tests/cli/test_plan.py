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


@pytest.mark.parametrize("as_json", [False, True])
def test_a_model_that_does_not_fit_is_told_so(as_json):
    """The table is shown: what each stage would need is in it. A balance is none, as nothing runs."""
    done = run("plan", "--stage-memory", "10M", "--dtype", "bfloat16", *["--json"] * as_json)
    assert done.returncode == 2
    assert done.one_line == (
        "ppserve: error: --stage-memory: 10 MiB is 833.1 KiB too little: a stage needs 10.81 MiB for one sequence"
        " of 1024 tokens (5.814 MiB of weights, 5 MiB of keys and values); this fits: --quantization int8"
        " or --stages 2 or --max-model-len 848 or --stage-memory 11M\n"
    )
    if as_json:
        assert json.loads(done.stdout)["max_sequences"] == 0
    else:
        assert "5.814 MiB" in done.stdout
        assert "balance" not in done.stdout
    assert " sequence of 848 tokens fits at once\n" in plan(
        "--stage-memory", "10M", "--dtype", "bfloat16", "--max-model-len", "848"
    )


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--max-model-len", "1"], "--max-model-len: 1 has no room for a prompt and an answer"),
        (["--stages", "0"], "--stages"),
        (["--stages", "9"], "--stages: 9 stages cannot share 8 layers"),
        (["--expect", "128,128,16"], "'--expect': it was removed: --layers auto balances for"),
        (["--world", "4"], "'--world': it was removed: `ppserve plan` shows one shape"),
        (
            ["--costs", "costs.json"],
            "'--costs': it was removed: `ppserve plan` predicts no speeds; `ppserve",
        ),
    ],
)
def test_mistakes_are_named(args, problem):
    done = run("plan", *args)
    assert done.returncode == 2
    assert problem in done.one_line
