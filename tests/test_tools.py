"""The makers of models: what they promise is what comes out. Also the end of `make chat`."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import tiktoken
import torch
import transformers

from ppserve.errors import CheckpointError
from ppserve.model.checkpoint.fetching import fetched
from ppserve.model.checkpoint.opening import open_checkpoint
from tests.model.checkpoint.writers import architecture, random_tensors, write_gguf
from tools import chat, make_random_llama
from tools import make_random_gpt2 as random_maker
from tools import make_tiny_model as tiny_maker
from tools.make_random_gpt2 import gpt2_config

TINY = Path(__file__).parents[1] / "ppserve/assets/tiny"


@pytest.fixture(scope="module")
def encoding() -> tiktoken.Encoding:
    return tiny_maker.learn_vocabulary(tiny_maker.Shape(), seed=1)


@pytest.mark.slow
def test_the_built_in_vocabulary_is_the_one_its_maker_learns(encoding: tiktoken.Encoding) -> None:
    ranks = random_maker.read_ranks(TINY / "tokenizer.tiktoken")
    assert {encoding.decode_single_token_bytes(rank): rank for rank in range(len(ranks))} == ranks


@pytest.mark.slow
def test_the_built_in_config_is_the_one_its_maker_writes(encoding: tiktoken.Encoding) -> None:
    sizes = asdict(tiny_maker.Shape())
    del sizes["num_ranks"]
    config = gpt2_config(**sizes, vocab_size=encoding.n_vocab, dtype="bfloat16")
    assert json.dumps(config, indent=2) + "\n" == (TINY / "config.json").read_text()


@pytest.mark.slow
def test_the_built_in_model_knows_its_stories(encoding: tiktoken.Encoding) -> None:
    tiny_model = transformers.GPT2LMHeadModel.from_pretrained(TINY, dtype=torch.float32)
    ids_NT, targets_NT = tiny_maker.Corpus(encoding, seed=123, noise_share=0.0).windows(4, 512)
    with torch.no_grad():
        logits_NTV = tiny_model(ids_NT).logits
    loss = torch.nn.functional.cross_entropy(logits_NTV.flatten(0, 1), targets_NT.flatten())
    assert loss < 0.7  # nats per token; uniform guessing costs 7.2


@pytest.mark.slow
def test_a_random_model_loads_in_transformers_and_comes_from_its_seed(tmp_path: Path) -> None:
    shape = random_maker.Shape(num_layers=2, width=48, num_heads=3, max_positions=64, vocab_size=300)
    written = []
    for name, seed in (("a", 0), ("again", 0), ("other", 1)):
        random_maker.write_checkpoint(tmp_path / name, shape, seed)
        written.append((tmp_path / name / "model.safetensors").read_bytes())
    assert written[0] == written[1]
    assert written[0] != written[2]
    model, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert sum(p.numel() for p in model.parameters()) == 300 * 48 + 64 * 48 + 2 * (12 * 48 * 48 + 13 * 48) + 2 * 48


def test_a_random_llama_has_the_sizes_asked_for_weights_around_zero_and_another_models_tokenizer(
    tmp_path: Path,
) -> None:
    other = architecture()
    tokenizer = write_gguf(tmp_path / "other.gguf", other, random_tensors(other))
    sizes = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "inner": 96}
    count = make_random_llama.write(tmp_path / "a.gguf", **sizes, tokenizer=tokenizer)
    checkpoint = open_checkpoint(str(tmp_path / "a.gguf"))
    arch = checkpoint.architecture
    assert (arch.num_layers, arch.width, arch.num_heads, arch.num_kv_heads, arch.inner_width) == (2, 64, 4, 2, 96)
    assert arch.num_params == count
    assert arch.vocab_size == other.vocab_size
    up = checkpoint.tensor("h.1.mlp.up.weight")
    assert abs(up.mean()) < make_random_llama.STD / 20
    assert up.std() == pytest.approx(make_random_llama.STD, rel=0.1)
    assert checkpoint.four_bits("h.1.mlp.down.weight", (slice(0, 64),)) is not None


def test_a_command_runs_as_on_another_cpu() -> None:
    script = str(TINY.parents[2] / "tools/as_other_cpu.sh")
    asked = [
        sys.executable,
        "-c",
        "import os; print(os.environ['NUMBA_CPU_NAME'], os.environ['NUMBA_CPU_FEATURES'])",
    ]
    runs = [
        subprocess.run([script, cpu, *asked], capture_output=True, text=True, timeout=60)
        for cpu in ("haswell", "x86-64-v2", "i486")
    ]
    assert [run.returncode for run in runs] == [0, 0, 2]
    assert runs[2].stderr == "as_other_cpu.sh: i486: known are haswell and x86-64-v2\n"
    if platform.machine() != "x86_64":
        assert all("skipped" in run.stdout for run in runs[:2])
        return
    for run, cpu in zip(runs, ("haswell", "x86-64-v2"), strict=False):
        name, features = run.stdout.split()
        assert (name, "+avx2" in features) == (cpu, cpu == "haswell")


FAKE = """import os, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
os.rename(sys.argv[1], sys.argv[1] + ".pid")
if "soon" in sys.argv:
    print("ppserve ready grpc=a:1 metrics=a:3 stages=2 http=b:2", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("ready", "ending"), [("never", signal.SIGINT), ("soon", signal.SIGTERM), ("soon", signal.SIGHUP)]
)
def test_a_signal_ends_the_server_of_make_chat(ready: str, ending: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "ppserve.py").write_text(FAKE)
    begun = tmp_path / ("chat.pid" if ready == "soon" else "serve.pid")
    command = [sys.executable, chat.__file__, "--model", ready]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        starting = process.stderr.readline()
        while not begun.exists():
            time.sleep(0.01)
        process.send_signal(ending)
        assert (starting, process.stderr.read()) == (f"starting 2 stages of {ready}\n", "")
    assert process.returncode == 128 + ending
    for started in tmp_path.glob("*.pid"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(started.read_text()), 0)


def made_chat(model: str, lines: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, chat.__file__, "--model", model]
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=220, check=False)


OPTIONS = ["max_tokens = 512", "temperature = 0.7", "repetition_penalty = 1.1"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_make_chat_talks_with_the_server_that_it_starts_and_ends_both() -> None:
    done = made_chat("tiny", "/show\n/stages\nhi\n")
    starting, served, system, *rest = done.stderr.splitlines()
    assert (starting, system) == ("starting 2 stages of tiny", "system message: none")
    assert served.startswith("tiny, 2.843 M parameters, ")
    assert rest[:3] == OPTIONS
    assert rest[4] == "the last line shows what the stages do; /stages hides it"
    assert "no chat template" in rest[5]
    assert done.returncode == 1


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_make_chat_serves_smollm2_in_the_four_bits_of_its_file_and_says_so() -> None:
    try:
        fetched()
    except CheckpointError:
        pytest.skip("needs smollm2: ppserve fetch smollm2")
    done = made_chat("smollm2", "/show\n/set seed 3\nWhat is the capital of France?\n")
    assert done.returncode == 0
    assert "Paris" in done.stdout
    assert "int4 weights" in done.stderr.splitlines()[1]
    assert done.stderr.splitlines()[3:6] == OPTIONS
