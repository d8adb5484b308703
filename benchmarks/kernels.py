"""Times the kernels of a CPU stage on a 124M-shaped GPT-2 with random weights.

    OMP_NUM_THREADS=1 python benchmarks/kernels.py step [--dtype bfloat16] [--quantization int8] [--threads 1,2]
    OMP_NUM_THREADS=1 python benchmarks/kernels.py products [--rows 1,8,16] [--precision int4]

`step` prints the milliseconds of a step of the whole model in one stage, by numbers of decoding rows and prompt
tokens: the fastest by one thread, by several, and by tensor ranks that are threads, in turns.

`products` prints the milliseconds of the 48 products of all layers, beside oneDNN's, with what that is in GFLOP/s
and in GB/s of weights. One thread alone is timed by its own CPU time, which a busy machine disturbs less.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests are no package of the environment

from ppserve.core.architecture import StageLayout
from ppserve.core.plan import Draw, Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.model.checkpoint import MatrixInMemory
from ppserve.model.cpu.backend import CpuBackend
from ppserve.model.cpu.kernels.memory import Arena, address, aligned
from ppserve.model.cpu.kernels.products import Scratch, micro_kernels
from ppserve.model.cpu.kernels.storage import Storage
from ppserve.model.cpu.kernels.tile_code import MicroKernel
from ppserve.model.cpu.kernels.variants import features, in_use
from ppserve.model.cpu.linear import PackedWeights
from ppserve.model.decoder import load_stage
from ppserve.model.inputs import build_inputs
from ppserve.stage.transport.gather import connect_ranks
from tests.architectures import gpt2 as gpt2_architecture
from tests.model.cpu.products import multiply_rows, pack_rows
from tests.model.random_checkpoint import RandomCheckpoint

GPT2 = gpt2_architecture(12, 768, 12, 1024, 50257, 50257, 3072)
SHAPES = ((768, 2304), (768, 768), (768, 3072), (3072, 768))
BLOCK_SIZE, MOST_ROWS = 16, 64
GREEDY = SamplingParams(temperature=0)


def decode_plan(num_rows: int, context: int, sampling: SamplingParams = GREEDY) -> StepPlan:
    table_size = -(-(context + 1) // BLOCK_SIZE)
    tables = [tuple(range(i * table_size, (i + 1) * table_size)) for i in range(num_rows)]
    slices = (Slice(i, context, (11,), table, Draw(sampling)) for i, table in enumerate(tables))
    return StepPlan(0, 0, 0, tuple(slices))


def prefill_plan(num_tokens: int, context: int) -> StepPlan:
    table = tuple(range(-(-(context + num_tokens) // BLOCK_SIZE)))
    return StepPlan(0, 0, 0, (Slice(0, context, tuple(range(num_tokens)), table, Draw(GREEDY)),))


class Contender:
    """A whole model in one stage: by a number of threads, or by tensor ranks, which are threads as well."""

    def __init__(self, dtype: str, quantization: str, threads: int, ranks: int, num_blocks: int) -> None:
        self.threads = threads * ranks
        whole = StageLayout(0, 1, 0, 2 * GPT2.num_layers)
        self._ranks = []
        for rank, link in enumerate(connect_ranks(ranks)):
            layout, backend = (
                replace(whole, tensor=rank, num_tensor=ranks),
                CpuBackend(dtype, threads, quantization),
            )
            cache = backend.make_cache(GPT2, layout, num_blocks, BLOCK_SIZE)
            self._ranks.append((load_stage(RandomCheckpoint(GPT2), layout, backend), cache, link))
        self._pool = ThreadPoolExecutor(ranks)

    def __call__(self, plan: StepPlan) -> None:
        if len(self._ranks) == 1:
            self._step(0, plan)
        else:
            list(self._pool.map(self._step, range(len(self._ranks)), [plan] * len(self._ranks)))

    def _step(self, rank: int, plan: StepPlan) -> None:
        stage, cache, link = self._ranks[rank]
        inputs = build_inputs(plan, stage.layout, cache, link)
        stage.read_out(inputs, stage.forward(inputs, None))()


def best_of(
    contenders: dict[str, Callable[[], None]], seconds: float, clock: Callable[[], float]
) -> dict[str, float]:
    """Least milliseconds of each; they take turns for so long, and the first round does not count."""
    best = dict.fromkeys(contenders, float("inf"))
    for contender in contenders.values():
        contender()
    until = time.monotonic() + seconds
    while time.monotonic() < until or float("inf") in best.values():
        for name, contender in contenders.items():
            begun = clock()
            contender()
            best[name] = min(best[name], 1e3 * (clock() - begun))
    return best


def ours(kind: MicroKernel, num_rows: int, layers: list[list[PackedWeights]]) -> Callable[[], None]:
    """Packing the rows and multiplying them, for every matrix."""
    tile_rows = kind.tile_rows(num_rows)
    padded = -(-num_rows // tile_rows) * tile_rows
    x, values = aligned(num_rows * 3072, np.float32), aligned(3072, np.float32)
    x[:] = np.random.default_rng(0).standard_normal(x.shape)
    words = aligned(padded * 3072 // kind.chunk_inputs * kind.row_bytes // 4, np.int32)
    scales = aligned(padded, np.float32)
    y = aligned(padded * 3072, np.float32)

    def multiply_all() -> None:
        rows = Scratch(num_rows, tile_rows, address(words), address(scales), 0, 0, 0, 0)
        for packed in (packed for layer in layers for packed in layer):
            weights = packed.seen_by_kernels
            shape = packed.num_inputs, rows, weights.chunks
            pack_rows(kind, Storage("float32"), address(x), *shape, address(values))
            multiply_rows(kind, weights, rows, address(y), 0, weights.outputs // 16)

    return multiply_all


def onednn(dtype: torch.dtype, num_rows: int) -> Callable[[], None]:
    reorder = torch.ops.mkldnn._reorder_linear_weight
    packed = [[reorder(torch.randn(n, k).to(dtype), None) for k, n in SHAPES] for _ in range(GPT2.num_layers)]
    rows = [torch.randn(num_rows, inputs).to(dtype) for inputs, _ in SHAPES]

    def multiply_all() -> None:
        for layer in packed:
            for x, matrix in zip(rows, layer, strict=True):
                torch.ops.mkldnn._linear_pointwise(x, matrix, None, "none", [], "")

    return multiply_all


@click.group()
def main() -> None:
    torch.set_num_threads(1)


@main.command()
@click.option("--dtype", default="float32", type=click.Choice(["float32", "bfloat16"]))
@click.option("--quantization", default="none", type=click.Choice(["none", "int8", "int4"]))
@click.option("--threads", default="1", help="Numbers of threads, with commas.")
@click.option("--ranks", default=1, help="Tensor ranks of one thread each, beside those; 1: none.")
@click.option("--context", default=160, help="Positions before each decoded row.")
@click.option("--seconds", default=2.0, help="Time for each line.")
def step(dtype: str, quantization: str, threads: str, ranks: int, context: int, seconds: float) -> None:
    num_blocks = MOST_ROWS * (-(-(context + 1) // BLOCK_SIZE)) + 64
    shapes = {f"{count} threads": (int(count), 1) for count in threads.split(",")}
    shapes |= {f"{ranks} ranks": (1, ranks)} if ranks > 1 else {}
    stages = {name: Contender(dtype, quantization, *shape, num_blocks) for name, shape in shapes.items()}
    clock = time.thread_time if all(stage.threads == 1 for stage in stages.values()) else time.perf_counter
    plans = {f"decode {count} rows at {context}": decode_plan(count, context) for count in (1, 4, 8, 16, 32, 64)}
    plans["decode 8 rows, top_p 0.95"] = decode_plan(8, context, SamplingParams(top_p=0.95, seed=1))
    plans |= {f"prefill {count} tokens": prefill_plan(count, 0) for count in (64, 128, 512)}
    plans["prefill 128 tokens after 896"] = prefill_plan(128, 896)
    print(f"{dtype}, {quantization}".ljust(30), *(name.rjust(12) for name in stages), "ms")
    for name, plan in plans.items():
        best = best_of({key: partial(stage, plan) for key, stage in stages.items()}, seconds, clock)
        print(name.ljust(30), *(f"{best[key]:12.3f}" for key in stages), flush=True)


@main.command()
@click.option("--rows", default="1,2,4,8,16,32,64,128,512", help="Numbers of rows, with commas.")
@click.option("--precision", multiple=True, default=["float32", "bfloat16", "int8"])
@click.option("--seconds", default=1.0, help="Time for each line.")
def products(rows: str, precision: tuple[str, ...], seconds: float) -> None:
    num_weights = GPT2.num_layers * sum(inputs * outputs for inputs, outputs in SHAPES)
    print(f"{'':45} ms  GFLOP/s   GB/s")
    for name in precision:
        dtype, arena = getattr(torch, name), Arena()
        kinds = {f"{k.operation} {k.rows[-1]}x{k.panels}": k for k in micro_kernels(name, in_use(), features())}
        matrices = [torch.randn(outputs, inputs) * 0.02 for inputs, outputs in SHAPES]
        layers = {
            label: [
                [PackedWeights(MatrixInMemory(m), None, dtype, kind, arena) for m in matrices]
                for _ in range(GPT2.num_layers)
            ]
            for label, kind in kinds.items()
        }
        for num_rows in map(int, rows.split(",")):
            contenders = {label: ours(kind, num_rows, layers[label]) for label, kind in kinds.items()}
            if not name.startswith("int"):
                contenders["oneDNN"] = onednn(dtype, num_rows)
            for label, ms in best_of(contenders, seconds, time.thread_time).items():
                gflops, gbytes = 2 * num_weights * num_rows / ms / 1e6, num_weights * dtype.itemsize / ms / 1e6
                print(f"{name:9} {num_rows:5}  {label:26} {ms:8.2f} {gflops:8.0f} {gbytes:6.1f}", flush=True)


if __name__ == "__main__":
    main()
