"""Times one stage's step by hand: a 124M-shaped GPT-2 with random weights, all layers in one stage.

    OMP_NUM_THREADS=1 python benchmarks/stage_step.py [--dtype bfloat16] [--quantization int8] [--threads 1,2]

For several numbers of decode rows and prefill tokens it prints milliseconds per step, split into sublayers,
head and sampling, and the rest, tokens per second, and how often as fast as with the first number of threads that
is. With one thread alone the clock is the thread's own CPU time, so that a busy machine disturbs it less.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import click
import torch

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.core.plan import Draw, Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.model.backend import StepInputs
from ppserve.model.checkpoint import WHOLE, Part
from ppserve.model.cpu.backend import CpuBackend
from ppserve.model.gpt2 import MLP, GPT2Stage, SelfAttention
from ppserve.model.inputs import build_inputs

GPT2 = Architecture(12, 768, 12, 1024, 50257, 50257, 3072)
BLOCK_SIZE = 16


@dataclass
class RandomWeights:
    """GPT-2's initialisation: normal, 0.02. The same in every process."""

    architecture: Architecture
    path: Path = Path("random")
    stored_dtype: str = "float32"

    def tensor(self, name: str, part: Part = WHOLE) -> torch.Tensor:
        return part.of(self._whole(name))

    def _whole(self, name: str) -> torch.Tensor:
        arch = self.architecture
        width, inner = arch.width, arch.inner_width
        part, kind = name.split(".")[-2:]
        outputs = {"wte": arch.vocab_size, "wpe": arch.max_positions, "lm_head": arch.vocab_size}
        outputs |= {"c_attn": 3 * width, "c_fc": inner, "c_proj": width}
        if part.startswith("ln_"):
            return torch.ones(width) if kind == "weight" else torch.zeros(width)
        if kind == "bias":
            return torch.zeros(outputs[part])
        shape = outputs[part], inner if name.endswith("mlp.c_proj.weight") else width
        return torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode()))) * 0.02


class Watch:
    """Sums the time spent inside the sublayers that it wraps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.spent: defaultdict[str, float] = defaultdict(float)

    def wrap(self, name: str, sublayer: SelfAttention | MLP) -> Callable[..., torch.Tensor]:
        def timed(hidden_TD: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
            begun = self.clock()
            try:
                return sublayer(hidden_TD, inputs)
            finally:
                self.spent[name] += self.clock() - begun

        return timed


class Bench:
    """A whole model in one stage with a number of threads."""

    def __init__(
        self, precision: tuple[str, str], threads: int, num_blocks: int, clock: Callable[[], float], joined: bool
    ) -> None:
        dtype, quantization = precision
        backend = CpuBackend(dtype, threads, quantization)
        self.threads = threads
        self.layout = StageLayout(0, 1, 0, 2 * GPT2.num_layers)
        self.stage = GPT2Stage.load(RandomWeights(GPT2), self.layout, backend)
        self.cache = backend.make_cache(GPT2, self.layout, num_blocks, BLOCK_SIZE)
        self.watch = Watch(clock)
        if joined:
            return
        self.stage.joined = None
        self.stage.sublayers = [
            self.watch.wrap("MLP" if isinstance(each, MLP) else "attention", each)  # type: ignore[misc]
            for each in self.stage.sublayers
        ]

    def step(self, plan: StepPlan) -> dict[str, float]:
        """Seconds by part."""
        watch = self.watch
        watch.spent.clear()
        begun = watch.clock()
        inputs = build_inputs(plan, self.layout, self.cache)
        built = watch.clock()
        hidden = self.stage.forward(inputs, None, self.cache)
        forwarded = watch.clock()
        self.stage.read_out(inputs, hidden)()
        ended = watch.clock()
        parts = {"step": ended - begun, "inputs": built - begun, "read out": ended - forwarded, **watch.spent}
        return parts | {"rest": forwarded - built - sum(watch.spent.values())}


def decode_plan(num_rows: int, context: int, sampling: SamplingParams) -> StepPlan:
    table_size = -(-(context + 1) // BLOCK_SIZE)
    tables = [tuple(range(i * table_size, (i + 1) * table_size)) for i in range(num_rows)]
    slices = (Slice(i, context, (11,), table, Draw(sampling)) for i, table in enumerate(tables))
    return StepPlan(0, 0, 0, tuple(slices))


def prefill_plan(num_tokens: int, context: int) -> StepPlan:
    table = tuple(range(-(-(context + num_tokens) // BLOCK_SIZE)))
    ids = tuple(i % GPT2.vocab_size for i in range(num_tokens))
    return StepPlan(0, 0, 0, (Slice(0, context, ids, table, Draw(SamplingParams(temperature=0))),))


def measure(benches: list[Bench], plan: StepPlan, seconds: float) -> list[dict[str, float]]:
    """The fastest step of each, of those that fit into `seconds` in turns: milliseconds by part."""
    best = [{"step": float("inf")} for _ in benches]
    until = time.monotonic() + seconds
    rounds = 0
    while rounds < 3 or time.monotonic() < until:
        rounds += 1
        for number, bench in enumerate(benches):
            found = bench.step(plan)
            if found["step"] < best[number]["step"]:
                best[number] = found
    return [{name: 1e3 * spent for name, spent in parts.items()} for parts in best]


@click.command()
@click.option("--dtype", default="float32", type=click.Choice(["float32", "bfloat16"]))
@click.option("--quantization", default="none", type=click.Choice(["none", "int8"]))
@click.option("--threads", default="1", help="Numbers of threads, with commas; they take turns.")
@click.option("--context", default=160, help="Positions before each decoded row.")
@click.option("--seconds", default=2.0, help="Time for each line.")
@click.option("--joined", is_flag=True, help="All sublayers in one call, as served: they are `rest`.")
def main(dtype: str, quantization: str, threads: str, context: int, seconds: float, joined: bool) -> None:
    counts = [int(count) for count in threads.split(",")]
    torch.set_num_threads(1)
    num_blocks = 64 * (-(-(context + 1) // BLOCK_SIZE)) + 64
    clock = time.thread_time if counts == [1] else time.perf_counter
    precision = dtype, quantization
    benches = [Bench(precision, count, num_blocks, clock, joined) for count in counts]
    columns = ("step", "attention", "MLP", "rest", "inputs", "read out")
    print(f"{dtype}; milliseconds".ljust(30), "threads", *(c.rjust(10) for c in columns), "  tokens/s   × first")
    greedy, nucleus = SamplingParams(temperature=0), SamplingParams(temperature=0.8, top_p=0.95, seed=1)
    plans = {f"decode {n} rows at {context}": decode_plan(n, context, greedy) for n in (1, 2, 4, 8, 16, 32, 64)}
    plans |= {f"decode {n} rows, top_p 0.95": decode_plan(n, context, nucleus) for n in (8,)}
    plans |= {f"prefill {n} tokens": prefill_plan(n, 0) for n in (64, 128, 256, 512)}
    plans |= {"prefill 128 tokens after 896": prefill_plan(128, 896)}
    for name, plan in plans.items():
        all_found = measure(benches, plan, seconds)
        for bench, found in zip(benches, all_found, strict=True):
            figures = (f"{found.get(column, 0):10.3f}" for column in columns)
            rate, ratio = 1e3 * plan.num_tokens / found["step"], all_found[0]["step"] / found["step"]
            print(name.ljust(30), f"{bench.threads:7}", *figures, f"{rate:10.0f} {ratio:9.2f}", flush=True)


if __name__ == "__main__":
    main()
