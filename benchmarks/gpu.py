"""Checks and times a stage on a GPU, in one call: what docs/gpu.md promises.

    python benchmarks/gpu.py [SECTION ...] [--model NAME] [--dtype bfloat16] [--json FILE]

Without a model `steps` times all of them, and the other sections have a GPT-2. Each section runs in a process of
its own that is ended after so many seconds, together less than 10 minutes. A section that fails says why, and the
others follow. Weights are random. `--device cpu --small` tries the script.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from ppserve import Pipeline
from ppserve.core.architecture import Architecture, Split, StageLayout, stage_layouts, sublayer_params
from ppserve.core.partition import decode_parts
from ppserve.core.plan import Draw, Slice, StepPlan, packed_biases, packed_ids
from ppserve.core.request import SamplingParams
from ppserve.errors import TransportError
from ppserve.model.cuda.backend import CudaBackend, DeviceOptions
from ppserve.model.decoder import load_stage
from ppserve.model.inputs import build_inputs
from ppserve.model.loaded import cached
from ppserve.model.selftest import check_determinism
from ppserve.stage import parallel_state
from ppserve.stage.step import Stage
from ppserve.stage.transport import Frames, create_transport
from tests.architectures import gpt2 as gpt2_architecture
from tests.architectures import llama as llama_architecture
from tests.model.checkpoint.writers import random_tensors, stored_name, write_hf, write_hf_state
from tests.model.random_checkpoint import RandomCheckpoint

MODELS = {
    "124M": gpt2_architecture(12, 768, 12, 1024, 50257, 50257, 3072),
    "1.5B": gpt2_architecture(48, 1600, 25, 1024, 50257, 50257, 6400),
    "1.1B": llama_architecture(22, 2048, 32, 4, 64, 2048, 32000, 5632),
}
SMALL = {
    "small": gpt2_architecture(2, 64, 4, 128, 211, 211, 256),
    "llama": llama_architecture(2, 128, 4, 2, 64, 128, 211, 256),
}
BLOCK, SEQUENCES, PROMPT, DECODES = 16, 4, 30, 40
BYTES_PER_S = {"H100": 3.35e12, "H200": 4.8e12}  # by the datasheets; another device's floor is that of the fastest
GOALS = {16: 4.0, 256: 2.5}  # by rows: a decoding step's time beside the time of its bytes


@dataclass
class Bench:
    """What a section is given. It notes figures and claims in a JSON file at once."""

    device: torch.device
    dtype: str
    small: bool
    model: str | None = None
    path: Path | None = None
    figures: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    """Sections of which a claim does not hold."""

    def check(self, section: str, figures: Mapping[str, Any] = MappingProxyType({}), **claims: bool) -> None:
        self.note(section, **figures, **claims)
        if not all(claims.values()):
            self.wrong.append(section)

    def note(self, section: str, **figures: Any) -> None:
        self.figures.setdefault(section, []).append(figures)
        if self.path is not None:
            self.path.write_text(json.dumps(self.figures, indent=1))
        shown = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in figures.items())
        print(section, *shown, flush=True)

    @property
    def models(self) -> dict[str, Architecture]:
        models = SMALL if self.small else MODELS
        return models if self.model is None else {self.model: models[self.model]}

    @property
    def arch(self) -> Architecture:
        """The architecture, for sections that have one model."""
        return next(iter(self.models.values()))

    @property
    def context(self) -> int:
        return 30 if self.small else 300

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@functools.cache
def checkpoint_of(arch: Architecture) -> RandomCheckpoint:
    """One for each model, whose numbers are drawn once: that takes longer than all else."""
    found = RandomCheckpoint(arch)
    found._whole = functools.cache(found._whole)  # type: ignore[method-assign]
    return found


class Alone:
    """A whole model as one stage."""

    def __init__(self, bench: Bench, arch: Architecture, rows: int, invariant: bool, graphs: bool) -> None:
        self.bench, self.arch = bench, arch
        self.backend = CudaBackend(bench.device, bench.dtype, DeviceOptions(invariant, graphs, rows))
        self.layout = StageLayout(0, 1, 0, 2 * arch.num_layers)
        self.plain = load_stage(checkpoint_of(arch), self.layout, self.backend)
        self.table_size = -(-(bench.context + DECODES + PROMPT) // BLOCK)
        self.cache = self.backend.make_cache(arch, self.layout, rows * self.table_size, BLOCK)
        self.cache.fill(0.01)
        begun = time.monotonic()
        self.model = self.backend.recorded(self.plain, self.cache)
        bench.wait()
        self.recording_s = time.monotonic() - begun

    def slice(self, number: int, start: int, count: int, draws: bool = True) -> Slice:
        ids = tuple((7 * number + 3 * at) % self.arch.vocab_size for at in range(start, start + count))
        table = tuple(range(number * self.table_size, (number + 1) * self.table_size))
        draw = Draw(SamplingParams(seed=number, temperature=0.8)) if draws else None
        return Slice(number, start, ids, table[: -(-(start + count) // BLOCK)], draw)

    def step(self, slices: list[Slice]) -> tuple[torch.Tensor, Any, float]:
        """Hidden states, results, and the milliseconds for which the device was busy."""
        inputs = build_inputs(StepPlan(0, 0, 0, tuple(slices)), self.layout, self.cache)
        timing = self.backend.timing()
        hidden_TD = self.model.forward(inputs, None)
        reading = self.model.read_out(inputs, hidden_TD)
        timing.computed()
        begun_ns, ended_ns = timing.busy_ns()
        return hidden_TD, reading(), (ended_ns - begun_ns) / 1e6

    def time(self, slices: list[Slice], repeats: int) -> tuple[float, float]:
        """Milliseconds per step: by the host's clock, all in a row, and the median of the device's own."""
        for _ in range(3):
            self.step(slices)
        self.bench.wait()
        begun = time.monotonic()
        busy = sorted(self.step(slices)[2] for _ in range(repeats))
        return (time.monotonic() - begun) * 1e3 / repeats, busy[repeats // 2]


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
            slices = tuple(replace(of, draw=draw) for of, draw in zip(undrawn, draws, strict=True))
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


def ranks(bench: Bench) -> None:
    """Two stages as two processes on one GPU, over NCCL: one stage's tokens, and a wait for the dead that ends."""
    arch = bench.arch
    one = Alone(bench, arch, SEQUENCES, True, False)
    alone = [[drawn.token_id for drawn in one.step(list(plan.slices))[1][0]] for plan in _rank_plans(one)]
    given = json.dumps([str(bench.device), bench.dtype, bench.small, bench.model])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "ranks", "--rank", given, folder]
        both = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in range(2)]
        try:
            said = both[1].communicate(timeout=LIMITS_S["ranks"] - 15)[0]
        finally:
            for process in both:
                process.kill()
                process.wait()
    found = json.loads(said.splitlines()[-1])
    drawn = found.pop("drawn")
    bench.check("ranks", found, same_tokens=drawn == alone, wait_ended=found["wait_ended_by"] is not None)


def _rank_plans(stage: Alone) -> list[StepPlan]:
    """One prompt each, then decodes. What is computed does not depend on what was drawn."""
    spans = [(0, PROMPT), *((PROMPT + i, 1) for i in range(DECODES))]
    steps = [tuple(stage.slice(i, start, count) for i in range(SEQUENCES)) for start, count in spans]
    return [StepPlan(0, number, 0, slices) for number, slices in enumerate(steps)]


def run_rank(given: str, folder: str, rank: int) -> None:
    """One of the two processes. NCCL refuses two ranks on one GPU of one host, so each claims another host.

    The first dies while the other waits. By NCCL an aborted wait returns as if all were well: an end too.
    """
    place, dtype, small, model = json.loads(given)
    device, bench = torch.device(place), Bench(torch.device(place), dtype, small, model)
    arch = bench.arch
    os.environ |= {"NCCL_HOSTID": f"ppserve-{rank}", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"NCCL_NET": "Socket", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    kind = "nccl" if device.type == "cuda" else "gloo"
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(kind, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    one = Alone(bench, arch, SEQUENCES, True, False)
    layout = stage_layouts(Split((arch.num_layers, arch.num_layers)))[rank]
    plain = load_stage(checkpoint_of(arch), layout, one.backend)
    cache = one.backend.make_cache(arch, layout, SEQUENCES * one.table_size, BLOCK)
    model = cached(plain, cache, layout, one.backend)
    frames = Frames(arch.width, one.backend.precision.hidden, device=device)
    transport = create_transport(kind, frames, parallel_state.get_pp_group())
    transport.warm_up()
    stage, drawn, plans = Stage(model, transport), [], _rank_plans(one)
    for plan in plans:
        stage.expect(plan)
        drawn.append([each.token_id for each in stage.step(plan, 0).result.drawn])
    if layout.is_first:
        time.sleep(2.0)
        os._exit(0)
    aborted = threading.Event()
    threading.Timer(5.0, lambda: (aborted.set(), stage.interrupt())).start()
    try:
        late = replace(plans[-1], step_id=len(plans))
        stage.expect(late)
        stage.step(late, 0)
        ended_by = "the abort" if aborted.is_set() else None
    except TransportError as error:
        ended_by = str(error)
    print(json.dumps({"drawn": drawn, "wait_ended_by": ended_by}), flush=True)
    os._exit(0)


def tests(bench: Bench) -> None:
    """The operators, buckets and drawing, on this machine's device."""
    options = ("-q", "--noconftest", "-c", "/dev/null", "--rootdir=.", "-p", "no:cacheprovider")
    done = subprocess.run([sys.executable, "-m", "pytest", *options, "tests/model/cuda"])
    bench.check("tests", passed=done.returncode == 0)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    section.__name__: section for section in (waits, invariance, steps, served, ranks, tests)
}
LIMITS_S = {"waits": 45.0, "invariance": 60.0, "steps": 165.0, "served": 100.0, "ranks": 70.0, "tests": 125.0}


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
@click.option("--rank", nargs=3, type=str, hidden=True, help="One process of the section `ranks`.")
def main(
    sections: tuple[str, ...], device: str, model: str | None, dtype: str, small: bool, path: Path | None,
    here: bool, rank: tuple[str, str, str] | None,
) -> None:  # fmt: skip
    if rank is not None:
        run_rank(rank[0], rank[1], int(rank[2]))
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
