"""Checks and times a stage on a GPU, in one call: what docs/gpu.md promises.

    python benchmarks/gpu.py [SECTION ...] [--model NAME] [--dtype bfloat16] [--json FILE]

Without a model `steps` times all of them, and the other sections have a GPT-2. Each section runs in a process of
its own that is ended after so many seconds, together less than 10 minutes. A section that fails says why, and the
others follow. Weights are random. `--device cpu --small` tries the script.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from msgspec import structs

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import gpu_ranks
from benchmarks.gpu_stage import MODELS, SEQUENCES, SMALL, Alone, Bench
from ppserve import Pipeline
from ppserve.core.architecture import Architecture, sublayer_params
from ppserve.core.partition import decode_parts
from ppserve.core.plan import Draw, StepPlan, packed_biases, packed_ids
from ppserve.core.request import SamplingParams
from ppserve.model.inputs import build_inputs
from ppserve.model.selftest import check_determinism
from tests.model.checkpoint.writers import random_tensors, stored_name, write_hf, write_hf_state

BYTES_PER_S = {"H100": 3.35e12, "H200": 4.8e12}  # by the datasheets; another device's floor is that of the fastest
GOALS = {16: 4.0, 256: 2.5}  # by rows: a decoding step's time beside the time of its bytes


def waits(bench: Bench) -> None:
    """torch raises where anything but reading the tokens waits for the device."""
    draws = [
        Draw(SamplingParams(seed=2, top_k=9, top_p=0.8), num_logprobs=2),
        Draw(SamplingParams(seed=3), banned=(5, 6), biases=packed_biases([(3, 4.0)])),
        Draw(SamplingParams(seed=4, repetition_penalty=1.1, frequency_penalty=0.2), prompt_ids=packed_ids((1, 2))),
        Draw(SamplingParams(temperature=0)),
    ]
    for graphs in (False, True):
        stage = Alone(bench, bench.arch, SEQUENCES, False, graphs)
        for counts in ((1, 1, 1, 1), (20, 7, 1 + bench.context // 2, 16), (1, 20, 1, 7)):
            undrawn = [stage.slice(i, bench.context if n == 1 else 0, n) for i, n in enumerate(counts)]
            slices = tuple(structs.replace(of, draw=draw) for of, draw in zip(undrawn, draws, strict=True))
            stage.step(list(slices))
            before = stage.backend.accelerator.num_waits
            if bench.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            inputs = build_inputs(StepPlan(0, 0, 0, slices), stage.layout, stage.cache)
            reading = stage.model.read_out(inputs, stage.model.forward(inputs, None))
            if bench.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
            reading()
            figures = {"graphs": graphs, "rows": counts, "waits": stage.backend.accelerator.num_waits - before}
            bench.check("waits", figures, at_most_one_wait=figures["waits"] <= 1)


def invariance(bench: Bench) -> None:
    """The self-test's words in both modes; and rows in a crowd and in chunks, bit for bit."""
    length = bench.context
    for invariant in (False, True):
        stage = Alone(bench, bench.arch, 5 if bench.small else 33, invariant, False)
        said = check_determinism(stage.plain)
        others = range(1, 5 if bench.small else 33)
        whole = stage.step([stage.slice(0, 0, length, draws=False)])[0].clone()
        for i in others:
            stage.step([stage.slice(i, 0, length - i % 7, draws=False)])
        alone, drawn_alone = stage.step([stage.slice(0, length, 1)])[:2]
        crowd = [stage.slice(i, length - i % 7, 1) for i in others]
        among, drawn_among = stage.step([*crowd, stage.slice(0, length, 1)])[:2]
        cut = [stage.slice(0, i, min(23, length - i), draws=False) for i in range(0, length, 23)]
        chunks = [stage.step([slice_])[0].clone() for slice_ in cut]
        bench.note("invariance", invariant=invariant, selftest=said or "passed")
        (bench.check if invariant else bench.note)(
            "invariance",
            selftest_passed=said is None,
            decode_in_a_crowd=torch.equal(among[-1], alone[0]),
            token_in_a_crowd=drawn_among[0][-1] == drawn_alone[0][0],
            prompt_in_chunks=torch.equal(torch.cat(chunks), whole),
        )


def steps(bench: Bench) -> None:
    """Decoding steps beside the time of the bytes that they read; prompts."""
    name = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else ""
    bytes_per_s = next((rate for known, rate in BYTES_PER_S.items() if known in name), max(BYTES_PER_S.values()))
    itemsize = getattr(torch, bench.dtype).itemsize
    for model, arch in bench.models.items():
        for invariant, graphs in ((False, True), (True, True)):
            sizes = (1, 4) if bench.small else (1, 16, 64, 256)
            stage = Alone(bench, arch, max(sizes), invariant, graphs)
            params = sublayer_params(arch, stage.layout)
            mode = {"model": model, "invariant": invariant, "recording_s": stage.recording_s}
            for rows in sizes:
                ms, busy_ms = stage.time([stage.slice(i, bench.context, 1) for i in range(rows)], 30)
                keys = rows * bench.context * 2 * arch.num_layers * arch.num_kv_heads * arch.head_size
                times = ms * bytes_per_s / 1e3 / ((params + decode_parts(arch).head + keys) * itemsize)
                reached = rows not in GOALS or times <= GOALS[rows]
                figures = {"rows": rows, "host_ms": ms, "device_ms": busy_ms, "times_floor": times}
                bench.note("steps", **mode, **figures, goal_reached=reached)
            ms, busy_ms = stage.time([stage.slice(0, 0, bench.context, draws=False)], 10)
            figures = {"prompt": bench.context, "host_ms": ms, "device_ms": busy_ms}
            bench.note("steps", **mode, **figures, flops_per_s=2 * bench.context * params / (busy_ms / 1e3))


def served(bench: Bench) -> None:
    """Tokens per second of whole pipelines on one GPU, their tokens, and the ledger's sums."""
    count, new = (4, 8) if bench.small else (256, 128)
    arch = replace(bench.arch, eos_ids=())
    prompts = [[(5 * i + j) % (arch.vocab_size - 1) for j in range(20 + i % 30)] for i in range(count)]
    tokens = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), arch, random_tensors(arch, dtype=getattr(torch, bench.dtype)))
        for stages, invariant in ((1, False), (1, True), (2, True)):
            settings: Any = {"dtype": bench.dtype, "max_num_seqs": count, "batch_invariant": invariant}
            with Pipeline(folder, stages, **settings) as pipeline:
                pipeline.complete_all(prompts[:2], max_tokens=4, ignore_eos=True)
                before, begun = pipeline.ledger(), time.monotonic()
                done = pipeline.complete_all(prompts, max_tokens=new, ignore_eos=True, seed=1, token_ids=True)
                per_s, spent = count * new / (time.monotonic() - begun), pipeline.ledger().since(before)
                deterministic = pipeline.model.deterministic
            tokens[stages, invariant] = [[t.id for t in each.sequences[0].tokens] for each in done]
            sums = [s.busy_s + sum(s.bubble_s.values()) + s.idle_s for s in spent.stages]
            gap_s = max(abs(whole_s - spent.wall_s) for whole_s in sums)
            figures = {"stages": stages, "invariant": invariant, "tokens_per_s": per_s, "ledger_gap_s": gap_s}
            figures["busy_share"] = spent.stages[0].busy_s / spent.wall_s
            promised = deterministic or not invariant
            adds_up = gap_s < 0.01 * spent.wall_s
            bench.check("served", figures, ledger_adds_up=adds_up, deterministic_as_promised=promised)
    bench.check("served", two_stages_say_the_same=tokens[1, True] == tokens[2, True])


def write_model(folder: Path, arch: Architecture, tensors: dict[str, torch.Tensor]) -> None:
    """Write a model as it is on Hugging Face, without a tokenizer."""
    if arch.family == "gpt2":
        write_hf(folder, arch, tensors)
        return
    sizes = {
        "hidden_size": arch.width,
        "num_hidden_layers": arch.num_layers,
        "intermediate_size": arch.inner_width,
    }
    sizes |= {"num_key_value_heads": arch.num_kv_heads, "head_dim": arch.head_size, "vocab_size": arch.vocab_size}
    sizes |= {"max_position_embeddings": arch.max_positions, "num_attention_heads": arch.num_heads}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config | sizes))
    write_hf_state(folder, {stored_name("llama", name, 0, "model.layers."): t for name, t in tensors.items()})


def tests(bench: Bench) -> None:
    """The operators, buckets and drawing, on this machine's device."""
    options = ("-q", "--noconftest", "-c", "/dev/null", "--rootdir=.", "-p", "no:cacheprovider")
    done = subprocess.run([sys.executable, "-m", "pytest", *options, "tests/model/cuda"])
    bench.check("tests", passed=done.returncode == 0)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    section.__name__: section for section in (waits, invariance, steps, served, gpu_ranks.ranks, tests)
}
LIMITS_S = {
    "waits": 45.0,
    "invariance": 60.0,
    "steps": 165.0,
    "served": 100.0,
    "ranks": gpu_ranks.LIMIT_S,
    "tests": 125.0,
}


def run_apart(name: str, options: list[str], limit_s: float, figures: Path) -> bool:
    """Whether a section succeeds. In a process of its own: what hangs in the driver can only be killed."""
    command = [sys.executable, __file__, name, "--here", *options, "--json", str(figures)]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait(limit_s) == 0
    except subprocess.TimeoutExpired:
        print(f"{name}: not done within {limit_s:.0f} s", flush=True)
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
        process.wait()


@click.command(help=__doc__)
@click.argument("sections", nargs=-1, type=click.Choice(list(SECTIONS)))
@click.option("--device", default="cuda:0")
@click.option("--model", type=click.Choice([*MODELS, *SMALL]))
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="bfloat16")
@click.option("--small", is_flag=True, help="A tiny model: to try this script.")
@click.option("--json", "path", type=click.Path(path_type=Path))
@click.option("--here", is_flag=True, hidden=True, help="One section, in this process.")
def main(
    sections: tuple[str, ...], device: str, model: str | None, dtype: str, small: bool, path: Path | None,
    here: bool,
) -> None:  # fmt: skip
    if here:
        bench = Bench(torch.device(device), dtype, small, model, path)
        SECTIONS[sections[0]](bench)
        sys.exit(bool(bench.wrong))
    options = ["--device", device, "--dtype", dtype, *["--small"] * small]
    options += [] if model is None else ["--model", model]
    figures, failed = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for name in sections or tuple(SECTIONS):
            own = Path(folder, name)
            if not run_apart(name, options, LIMITS_S[name], own):
                failed.append(name)
            if own.exists():
                figures |= json.loads(own.read_text())
            if path is not None:
                path.write_text(json.dumps(figures, indent=1))
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
