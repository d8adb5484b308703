"""Checks and times a stage on a GPU, in one call: what docs/gpu.md lists as unverified.

    python benchmarks/gpu_stage.py [SECTION ...] [--dtype bfloat16] [--json FILE]

Sections: waits, invariance, steps, host, prompts, served, ranks, tests. Without any, all of them, each in a
process of its own that is ended after so many seconds (together 10 minutes); one that fails says why and the
others go on. What was found until then is in FILE. Weights are random. Steps are timed by the host, over many in a
row, and by the device's own events; the floor is bytes over bandwidth. `--device cpu --small` tries the script
itself, by reference operators.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import gpu_ranks
from benchmarks.stage_step import GPT2, RandomWeights
from ppserve.core.architecture import Architecture, StageLayout, sublayer_params
from ppserve.core.plan import Draw, Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.model.backend import KVCache, StageModel
from ppserve.model.cuda.backend import CudaBackend, DeviceOptions
from ppserve.model.gpt2 import GPT2Stage
from ppserve.model.inputs import build_inputs
from ppserve.model.selftest import check_determinism

XL = Architecture(48, 1600, 25, 1024, 50257, 50257, 6400)
SMALL = Architecture(2, 64, 4, 128, 211, 211, 256)
# Memory, by the datasheets. Another device's floor is that of the fastest.
BYTES_PER_S = {"H100": 3.35e12, "H200": 4.8e12}
GOALS = {16: 4.0, 256: 2.5}  # by rows: times the floor
GOAL_SERVED = 5.0  # times transformers' continuous batching
BLOCK = 16


@dataclass
class Bench:
    """What a section is given; `figures` are in the JSON file at once. wrong: where a claim does not hold."""

    device: torch.device
    dtype: str
    small: bool
    path: Path | None = None
    figures: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def check(self, section: str, figures: Mapping[str, Any] = MappingProxyType({}), **claims: bool) -> None:
        """Notes them, with figures beside, and that the section has failed where one is False."""
        self.note(section, **figures, **claims)
        if not all(claims.values()):
            self.wrong.append(section)

    def note(self, section: str, **figures: Any) -> None:
        self.figures.setdefault(section, []).append(figures)
        if self.path is not None:
            self.path.write_text(json.dumps(self.figures, indent=1))
        told = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in figures.items())
        print(section, *told, flush=True)

    @property
    def models(self) -> dict[str, Architecture]:
        return {"small": SMALL} if self.small else {"124M": GPT2, "1.5B": XL}

    @property
    def context(self) -> int:
        return 30 if self.small else 300

    @property
    def rows(self) -> tuple[int, ...]:
        return (1, 4) if self.small else (1, 16, 64, 256)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def free(self) -> None:
        """What was let go goes back to the device, also of models that refer to themselves: whatever comes next
        asks the driver how much is there."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass
class Alone:
    """A whole model as one stage."""

    bench: Bench
    arch: Architecture
    max_rows: int
    batch_invariant: bool = False
    graphs: bool = False
    positions: int = 512

    def __post_init__(self) -> None:
        options = DeviceOptions(self.batch_invariant, self.graphs, self.max_rows)
        self.backend = CudaBackend(self.bench.device, self.bench.dtype, options)
        self.layout = StageLayout(0, 1, 0, 2 * self.arch.num_layers)
        self.plain = GPT2Stage.load(RandomWeights(self.arch), self.layout, self.backend)
        self.table_size = -(-min(self.positions, self.arch.max_positions) // BLOCK)
        blocks = self.max_rows * self.table_size
        self.cache: KVCache = self.backend.make_cache(self.arch, self.layout, blocks, BLOCK)
        self.cache.fill(0.01)
        begun = time.monotonic()
        self.model: StageModel = self.backend.recorded(self.plain, self.cache)
        self.bench.wait()
        self.recording_s = time.monotonic() - begun

    def piece(self, number: int, start: int, count: int, draws: bool = True) -> Slice:
        table = range(number * self.table_size, (number + 1) * self.table_size)
        ids = tuple((7 * number + 3 * at) % self.arch.vocab_size for at in range(start, start + count))
        draw = Draw(SamplingParams(seed=number, temperature=0.8)) if draws else None
        return Slice(number, start, ids, tuple(table)[: -(-(start + count) // BLOCK)], draw)

    def step(self, slices: list[Slice]) -> tuple[torch.Tensor, Any, float]:
        """Hidden states, results, and the milliseconds for which the device was busy."""
        inputs = build_inputs(StepPlan(0, 0, 0, tuple(slices)), self.layout, self.cache)
        timing = self.backend.timing()
        hidden_TD = self.model.forward(inputs, None, self.cache)
        reading = self.model.read_out(inputs, hidden_TD)
        timing.computed()
        busy = timing.busy()
        return hidden_TD, reading(), (busy.ended_ns - busy.begun_ns) / 1e6

    def time(self, slices: list[Slice], repeats: int) -> tuple[float, float]:
        """Milliseconds per step: by the host's clock, all in a row, and the median of what the device says."""
        for _ in range(3):
            self.step(slices)
        self.bench.wait()
        begun = time.monotonic()
        busy = sorted(self.step(slices)[2] for _ in range(repeats))
        return (time.monotonic() - begun) * 1e3 / repeats, busy[repeats // 2]


def tests(bench: Bench) -> None:
    """The operators, buckets and drawing, on this machine's device."""
    options = ("-q", "--noconftest", "-c", "/dev/null", "--rootdir=.", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "tests/model/cuda"], capture_output=True, text=True
    )
    print(done.stdout[-6000:], done.stderr[-2000:])
    bench.check("tests", passed=done.returncode == 0)


def waits(bench: Bench) -> None:
    """torch raises where anything but reading the tokens waits for the device: in decodes, prompts and both, with
    every kind of draw."""
    arch = next(iter(bench.models.values()))
    for graphs in (False, True):
        stage = Alone(bench, arch, 4, graphs=graphs)
        for kind, slices in _kinds_of_steps(stage, bench.context).items():
            stage.step(slices)
            waited = stage.backend.beside.num_waits
            if bench.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            try:
                inputs = build_inputs(StepPlan(0, 0, 0, tuple(slices)), stage.layout, stage.cache)
                hidden_TD = stage.model.forward(inputs, None, stage.cache)
                reading = stage.model.read_out(inputs, hidden_TD)
            finally:
                if bench.device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
            reading()
            num_waits = stage.backend.beside.num_waits - waited
            figures = {"graphs": graphs, "step": kind, "waits": num_waits}
            bench.check("waits", figures, at_most_one_wait=num_waits <= 1)


def _kinds_of_steps(stage: Alone, context: int) -> dict[str, list[Slice]]:
    plain = Draw(SamplingParams(seed=1, temperature=0.8))
    draws = [
        Draw(SamplingParams(seed=2, top_k=9, top_p=0.8), num_logprobs=2),
        Draw(SamplingParams(seed=3, logit_bias=((3, 4.0),)), banned=(5, 6)),
        Draw(SamplingParams(seed=4, repetition_penalty=1.1, frequency_penalty=0.2), prompt_ids=(1, 2)),
        Draw(SamplingParams(temperature=0)),
    ]

    def step(counts: list[int], of: list[Draw]) -> list[Slice]:
        pieces = [stage.piece(i, context if count == 1 else 0, count) for i, count in enumerate(counts)]
        return [replace(piece, draw=draw) for piece, draw in zip(pieces, of, strict=True)]

    scored = replace(step([9], [plain])[0], targets=tuple(range(9)), num_prompt_logprobs=2)
    return {
        "decodes": step([1] * 4, [plain] * 4),
        "decodes, all draws": step([1] * 4, draws),
        "prompts, all draws": step([20, 7, 1 + context, 16], draws),
        "both, all draws": step([1, 20, 1, 7], draws),
        "a scored prompt": [scored],
    }


def steps(bench: Bench) -> None:
    """Decoding steps against the bytes that they must read."""
    bytes_per_s = _bytes_per_s(bench)
    itemsize = getattr(torch, bench.dtype).itemsize
    for name, arch in bench.models.items():
        for invariant, graphs in ((False, True), (False, False), (True, True)):
            stage = Alone(bench, arch, max(bench.rows), invariant, graphs)
            weights = sublayer_params(arch, stage.layout) + arch.head_params
            for rows in bench.rows:
                decodes = [stage.piece(i, bench.context, 1) for i in range(rows)]
                ms, busy_ms = stage.time(decodes, 5 if bench.small else 50)
                keys = rows * bench.context * 2 * arch.num_layers * arch.width
                floor_ms = (weights + keys) * itemsize / bytes_per_s * 1e3
                goal, times_floor = GOALS.get(rows), ms / floor_ms
                bench.note(
                    "steps", model=name, rows=rows, invariant=invariant, graphs=graphs, host_ms=ms,
                    device_ms=busy_ms, floor_ms=floor_ms, times_floor=times_floor, goal=goal,
                    goal_reached=None if goal is None else times_floor <= goal, recording_s=stage.recording_s,
                )  # fmt: skip
            del stage
            bench.free()


def _bytes_per_s(bench: Bench) -> float:
    name = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else ""
    return next((of for known, of in BYTES_PER_S.items() if known in name), max(BYTES_PER_S.values()))


def host(bench: Bench) -> None:
    """CPU time of the thread that prepares a decoding step: of sequences that draw plainly, with penalties that
    count 300 tokens, with 100 biases."""
    torch.set_num_threads(1)  # what stands for a GPU's copies would else wait for threads of torch
    ids = tuple(7 * i % 200 for i in range(300))
    biases = tuple((i, 1.0) for i in range(100))
    draws = {
        "plain": Draw(SamplingParams(seed=1)),
        "penalties": Draw(
            SamplingParams(seed=1, repetition_penalty=1.1, frequency_penalty=0.2),
            prompt_ids=ids[:200],
            output_ids=ids[200:],
        ),
        "biases": Draw(SamplingParams(seed=1, logit_bias=biases)),
    }
    stage = Alone(bench, SMALL, 64, graphs=True, positions=SMALL.max_positions)
    for kind, draw in draws.items():
        decodes = [replace(stage.piece(i, 100, 1), draw=draw) for i in range(64)]
        plan, spent = StepPlan(0, 0, 0, tuple(decodes)), []
        for _ in range(100):
            begun = time.thread_time()
            build_inputs(plan, stage.layout, stage.cache)
            spent.append(time.thread_time() - begun)
            bench.wait()
        bench.note("host", rows=64, draws=kind, us=sorted(spent)[50] * 1e6, least_us=min(spent) * 1e6)


def prompts(bench: Bench) -> None:
    """Prompt tokens against the rate of one large product on this device."""
    peak = _peak_flops(bench)
    for name, arch in bench.models.items():
        for invariant in (False, True):
            stage = Alone(bench, arch, 4, invariant, positions=1024)
            for count in (16, 100) if bench.small else (128, 512, 1000):
                ms, busy_ms = stage.time([stage.piece(0, 0, count, draws=False)], 3 if bench.small else 20)
                flops = 2 * count * sublayer_params(arch, stage.layout)
                bench.note(
                    "prompts", model=name, tokens=count, invariant=invariant, host_ms=ms, device_ms=busy_ms,
                    share_of_peak=flops / (busy_ms / 1e3) / peak,
                )  # fmt: skip
            del stage
            bench.free()


def _peak_flops(bench: Bench) -> float:
    side = 256 if bench.small else 8192
    x = torch.randn(side, side, device=bench.device).to(getattr(torch, bench.dtype))
    for _ in range(3):
        x @ x
    bench.wait()
    begun = time.monotonic()
    for _ in range(10):
        x @ x
    bench.wait()
    return 10 * 2 * side**3 / (time.monotonic() - begun)


def invariance(bench: Bench) -> None:
    """What the self-test says in both modes; and rows in a crowd, in chunks and replayed, bit for bit."""
    arch = next(iter(bench.models.values()))
    length = bench.context
    for invariant in (False, True):
        stage = Alone(bench, arch, 33 if not bench.small else 5, invariant)
        said = check_determinism(stage.plain)
        others = range(1, stage.max_rows)
        whole = stage.step([stage.piece(0, 0, length, draws=False)])[0].clone()
        for i in others:
            stage.step([stage.piece(i, 0, length - i % 7, draws=False)])
        crowd = [stage.piece(i, length - i % 7, 1) for i in others]
        alone, drawn_alone = stage.step([stage.piece(0, length, 1)])[:2]
        alone = alone.clone()
        among, drawn_among = stage.step([*crowd, stage.piece(0, length, 1)])[:2]
        pieces = [stage.piece(0, i, min(23, length - i), draws=False) for i in range(0, length, 23)]
        chunks = [stage.step([piece])[0] for piece in pieces]
        bench.note("invariance", invariant=invariant, selftest=said or "passed")
        # Without the choice they may hold or not.
        (bench.check if invariant else bench.note)(
            "invariance",
            selftest_passed=said is None,
            decode_in_a_crowd=torch.equal(among[-1], alone[0]),
            token_in_a_crowd=drawn_among[0][-1] == drawn_alone[0][0],
            prompt_in_chunks=torch.equal(torch.cat(chunks), whole),
        )


def served(bench: Bench) -> None:
    """Tokens per second of whole pipelines on one GPU, the ledger's sums, and transformers beside them."""
    from transformers import GPT2Config, GPT2LMHeadModel

    count, new = (4, 8) if bench.small else (256, 128)
    arch = next(iter(bench.models.values()))
    config = GPT2Config(
        vocab_size=arch.vocab_size, n_positions=arch.max_positions, n_embd=arch.width, n_layer=arch.num_layers,
        n_head=arch.num_heads, bos_token_id=0, eos_token_id=arch.vocab_size - 1,
    )  # fmt: skip
    prompts = [[(5 * i + j) % (arch.vocab_size - 1) for j in range(20 + i % 30)] for i in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        model = GPT2LMHeadModel(config).to(getattr(torch, bench.dtype))
        model.save_pretrained(folder)
        ours = {of: _ours(bench, folder, prompts, new, *of) for of in ((1, False), (1, True), (2, True))}
        bench.check("served", two_stages_say_the_same=ours[1, True][0] == ours[2, True][0])
        theirs_per_s = _transformers(bench, model.to(bench.device).eval(), prompts, new)
    if theirs_per_s is not None:
        for (stages, invariant), (_, per_s) in ours.items():
            times = per_s / theirs_per_s
            bench.note(
                "served", stages=stages, invariant=invariant, times_continuous_batching=times, goal=GOAL_SERVED,
                goal_reached=times >= GOAL_SERVED,
            )  # fmt: skip


def _ours(
    bench: Bench, folder: str, prompts: list[list[int]], new: int, stages: int, invariant: bool
) -> tuple[list[list[int]], float]:
    """Token ids, and how many of them in a second."""
    from ppserve import Pipeline

    settings: Any = {"dtype": bench.dtype, "max_num_seqs": len(prompts), "batch_invariant": invariant}
    with Pipeline(folder, stages, **settings) as pipeline:
        pipeline.complete_all(prompts[:2], max_tokens=4, ignore_eos=True)
        before, begun = pipeline.ledger(), time.monotonic()
        done = pipeline.complete_all(prompts, max_tokens=new, ignore_eos=True, seed=1, token_ids=True)
        per_s, spent = len(prompts) * new / (time.monotonic() - begun), pipeline.ledger().since(before)
        deterministic = pipeline.model.deterministic
    answers = [[t.id for t in c.sequences[0].tokens] for c in done]
    gap_s = ledger_gap_s(spent)
    figures = {
        "by": "ppserve", "stages": stages, "invariant": invariant, "tokens_per_s": per_s,
        "busy_share": spent.stages[0].busy_s / spent.wall_s, "ledger_gap_s": gap_s, "deterministic": deterministic,
    }  # fmt: skip
    # Without batch-invariance it is not promised.
    promised = deterministic or not invariant
    bench.check("served", figures, ledger_adds_up=gap_s < 0.01 * spent.wall_s, deterministic_as_promised=promised)
    del pipeline
    bench.free()
    return answers, per_s


def ledger_gap_s(spent: Any) -> float:
    """By how much the sums of a stage miss the wall's time, at most."""
    sums = (s.busy_s + sum(s.bubble_s.values()) + s.idle_s for s in spent.stages)
    return max(abs(whole_s - spent.wall_s) for whole_s in sums)


def ranks(bench: Bench) -> None:
    """Two stages as two processes on one GPU, over NCCL: what one stage draws, the time of a step, and the end of
    a wait for a stage that has died."""
    arch = next(iter(bench.models.values()))
    one = Alone(bench, arch, gpu_ranks.SEQUENCES, batch_invariant=True)
    alone = [[drawn.token_id for drawn in one.step(list(plan.slices))[1][0]] for plan in gpu_ranks.plans(arch)]
    of = [str(bench.device), bench.dtype, json.dumps(astuple(arch))]
    with tempfile.TemporaryDirectory() as folder:
        both = [
            subprocess.Popen(
                [sys.executable, gpu_ranks.__file__, str(rank), folder, *of], stdout=subprocess.PIPE, text=True
            )
            for rank in range(2)
        ]
        try:
            said = both[1].communicate(timeout=LIMITS_S["ranks"] - 15)[0]
        finally:
            for process in both:
                process.kill()
                process.wait()
    found = json.loads(said.splitlines()[-1])
    drawn = found.pop("drawn")
    bench.note("ranks", **found)
    bench.check("ranks", two_processes_say_the_same=drawn == alone, wait_for_the_dead_ended=found["wait_ended"])


def answered(results: dict[str, Any]) -> int:
    """How many tokens transformers' continuous batching has returned: a request that failed has few or none."""
    return sum(len(result.generated_tokens) for result in results.values())


def _transformers(bench: Bench, model: Any, prompts: list[list[int]], new: int) -> float | None:
    """Tokens per second of its continuous batching; None where that cannot be had."""
    from transformers import GenerationConfig

    asked = GenerationConfig(
        max_new_tokens=new, min_new_tokens=new, do_sample=True, pad_token_id=0,
        eos_token_id=model.config.eos_token_id,
    )

    def eager() -> int:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=bench.device)
        answers = model.generate(ids, generation_config=asked, attention_mask=(ids != 0).long())
        return int((answers.shape[1] - longest) * len(answers))

    ways = {"eager": eager}
    if hasattr(model, "generate_batch"):
        ways["continuous batching"] = lambda: answered(model.generate_batch(prompts, generation_config=asked))
    found: dict[str, float] = {}
    for name, run in ways.items():
        try:
            bench.free()
            run()
            bench.wait()
            begun = time.monotonic()
            count = run()
            bench.wait()
            found[name] = per_s = count / (time.monotonic() - begun)
            missing = len(prompts) * new - count
            bench.note("served", by=f"transformers, {name}", tokens_per_s=per_s, tokens_missing=missing)
        except Exception as error:
            bench.note("served", by=f"transformers, {name}", failed=repr(error)[:200])
    return found.get("continuous batching")


SECTIONS: dict[str, Callable[[Bench], None]] = {
    of.__name__: of for of in (waits, invariance, steps, host, prompts, served, ranks, tests)
}
# A machine is lent for 10 minutes at a time, and has to be filled first. The tests come last: they compile most.
LIMITS_S = {
    "waits": 40.0,
    "invariance": 50.0,
    "steps": 115.0,
    "host": 20.0,
    "prompts": 50.0,
    "served": 120.0,
    "ranks": 65.0,
    "tests": 90.0,
}


def run_one(bench: Bench, name: str) -> bool:
    """Whether it could be run, and all that it claims holds."""
    try:
        SECTIONS[name](bench)
    except Exception:
        traceback.print_exc()
        return False
    return not bench.wrong


def run_apart(name: str, options: list[str], limit_s: float, figures: Path) -> bool:
    """A section in a process of its own: what hangs in the driver can only be killed."""
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


@click.command()
@click.argument("sections", nargs=-1, type=click.Choice(list(SECTIONS)))
@click.option("--device", default="cuda:0")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="bfloat16")
@click.option("--small", is_flag=True, help="A tiny model: to try this script.")
@click.option("--json", "path", type=click.Path(path_type=Path))
@click.option("--limit", type=float, help="Seconds that a section may take, instead of its own number.")
@click.option("--here", is_flag=True, hidden=True, help="One section, in this process.")
def main(
    sections: tuple[str, ...], path: Path | None, limit: float | None, here: bool, small: bool, **on: str
) -> None:
    if here:
        sys.exit(not run_one(Bench(torch.device(on["device"]), on["dtype"], small, path), sections[0]))
    options = ["--device", on["device"], "--dtype", on["dtype"], *["--small"] * small]
    figures, failed = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for name in sections or tuple(SECTIONS):
            begun, own = time.monotonic(), Path(folder, name)
            if not run_apart(name, options, limit or LIMITS_S[name], own):
                failed.append(name)
            if own.exists():
                figures |= json.loads(own.read_text())
            if path is not None:
                path.write_text(json.dumps(figures, indent=1))
            print(f"-- {name}: {time.monotonic() - begun:.0f} s", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
