"""Times one stage's step by hand: a 124M-shaped GPT-2 with random weights, all layers in one stage.

    OMP_NUM_THREADS=1 python benchmarks/stage_step.py [--dtype bfloat16] [--threads 1]

For several numbers of decode rows and prefill tokens it prints milliseconds per step, split into linears,
attention, head and sampling, and the rest, and tokens per second. With one thread the clock is the thread's
own CPU time, so that a busy machine disturbs it less.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.core.plan import Draw, Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.model.backend import Attend, KVCache, StepRows
from ppserve.model.cpu.backend import CpuBackend
from ppserve.model.cpu.kv_cache import CpuCache
from ppserve.model.gpt2 import GPT2Stage
from ppserve.model.inputs import build_inputs

GPT2 = Architecture(12, 768, 12, 1024, 50257, 50257, 3072)
BLOCK_SIZE = 16


@dataclass
class RandomWeights:
    """GPT-2's initialisation: normal, 0.02."""

    architecture: Architecture
    path: Path = Path("random")
    stored_dtype: str = "float32"

    def tensor(self, name: str) -> torch.Tensor:
        arch = self.architecture
        width, inner = arch.width, arch.inner_width
        part, kind = name.split(".")[-2:]
        outputs = {"wte": arch.vocab_size, "wpe": arch.max_positions, "lm_head": arch.vocab_size}
        outputs |= {"c_attn": 3 * width, "c_fc": inner, "c_proj": width}
        if part.startswith("ln_"):
            return torch.ones(width) if kind == "weight" else torch.zeros(width)
        if kind == "bias":
            return torch.zeros(outputs[part])
        return torch.randn(outputs[part], inner if name.endswith("mlp.c_proj.weight") else width) * 0.02


class Watch:
    """Sums the time spent inside the callables that it wraps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.spent: defaultdict[str, float] = defaultdict(float)

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begun = self.clock()
            try:
                return function(*arguments)
            finally:
                self.spent[name] += self.clock() - begun

        return timed


class WatchedCache:
    """A cache whose attention is timed."""

    def __init__(self, cache: CpuCache, watch: Watch) -> None:
        self.num_blocks, self.block_size, self.device = cache.num_blocks, cache.block_size, cache.device
        self.begin, self.fill, self.close = cache.begin, cache.fill, cache.close
        self._cache, self._watch = cache, watch

    def attention(self, rows: StepRows) -> Attend:
        return self._watch.wrap("attention", self._cache.attention(rows))


def decode_plan(num_rows: int, context: int, sampling: SamplingParams) -> StepPlan:
    table_size = -(-(context + 1) // BLOCK_SIZE)
    tables = [tuple(range(i * table_size, (i + 1) * table_size)) for i in range(num_rows)]
    slices = (Slice(i, context, (11,), table, Draw(sampling)) for i, table in enumerate(tables))
    return StepPlan(0, 0, 0, tuple(slices))


def prefill_plan(num_tokens: int, context: int) -> StepPlan:
    table = tuple(range(-(-(context + num_tokens) // BLOCK_SIZE)))
    ids = tuple(i % GPT2.vocab_size for i in range(num_tokens))
    return StepPlan(0, 0, 0, (Slice(0, context, ids, table, Draw(SamplingParams(temperature=0))),))


def measure(stage: GPT2Stage, cache: KVCache, plan: StepPlan, watch: Watch, seconds: float) -> dict[str, float]:
    """The fastest of the steps that fit into `seconds`: milliseconds by part."""
    best: dict[str, float] = {"step": float("inf")}
    until = time.monotonic() + seconds
    rounds = 0
    while rounds < 3 or time.monotonic() < until:
        rounds += 1
        watch.spent.clear()
        begun = watch.clock()
        inputs = build_inputs(plan, stage.layout, cache)
        built = watch.clock()
        hidden = stage.forward(inputs, None, cache)
        forwarded = watch.clock()
        stage.read_out(plan, inputs, hidden)
        ended = watch.clock()
        if 1e3 * (ended - begun) < best["step"]:
            parts = {"step": ended - begun, "inputs": built - begun, "read out": ended - forwarded, **watch.spent}
            parts["rest"] = forwarded - built - sum(watch.spent.values())
            best = {name: 1e3 * spent for name, spent in parts.items()}
    return best


@click.command()
@click.option("--dtype", default="float32", type=click.Choice(["float32", "bfloat16"]))
@click.option("--threads", default=1)
@click.option("--context", default=160, help="Positions before each decoded row.")
@click.option("--seconds", default=2.0, help="Time for each line.")
def main(dtype: str, threads: int, context: int, seconds: float) -> None:
    torch.set_num_threads(threads)
    backend = CpuBackend(dtype, threads)
    layout = StageLayout(0, 1, 0, 2 * GPT2.num_layers)
    stage = GPT2Stage.load(RandomWeights(GPT2), layout, backend)
    watch = Watch(time.thread_time if threads == 1 else time.perf_counter)
    num_blocks = 64 * (-(-(context + 1) // BLOCK_SIZE)) + 64
    cache = WatchedCache(backend.make_cache(GPT2, layout, num_blocks, BLOCK_SIZE), watch)
    for part in stage.attentions:
        part._qkv, part._proj = (watch.wrap("linears", each) for each in part.linears)
    for part in stage.mlps:
        part._expand, part._contract = (watch.wrap("linears", each) for each in part.linears)
        part._activate = watch.wrap("activation", part._activate)
    columns = ("step", "linears", "attention", "activation", "rest", "inputs", "read out")
    print(f"{dtype}, {threads} threads; milliseconds".ljust(34), *(c.rjust(10) for c in columns), "  tokens/s")
    greedy, nucleus = SamplingParams(temperature=0), SamplingParams(temperature=0.8, top_p=0.95, seed=1)
    plans = {f"decode {n} rows at {context}": decode_plan(n, context, greedy) for n in (1, 2, 4, 8, 16, 32, 64)}
    plans |= {f"decode {n} rows, top_p 0.95": decode_plan(n, context, nucleus) for n in (8,)}
    plans |= {f"prefill {n} tokens": prefill_plan(n, 0) for n in (64, 128, 256, 512)}
    plans |= {"prefill 128 tokens after 896": prefill_plan(128, 896)}
    for name, plan in plans.items():
        found = measure(stage, cache, plan, watch, seconds)
        figures = (f"{found.get(column, 0):10.3f}" for column in columns)
        print(name.ljust(34), *figures, f"{1e3 * plan.num_tokens / found['step']:10.0f}", flush=True)


if __name__ == "__main__":
    main()
