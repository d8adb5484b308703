"""Times a step of a 124M-shaped GPT-2 by one thread, by two threads, and by two tensor ranks that are threads:
with one call of a kernel for all sublayers, as served, and with one for each operator.

    OMP_NUM_THREADS=1 python benchmarks/tensor_step.py [--dtype float32] [--seconds 4] [--layers 12] [--alone]

They take turns, and the fastest step of each counts, which others on the machine disturbed least. Tensor ranks
gather through memory with the kernel that processes use. It also prints how long a rank waited for
the other in that step, on average over the two. --alone is for busy machines: one of two ranks computes by itself,
takes zeros for the other's columns, and only its thread's time counts.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import click
import torch
from stage_step import BLOCK_SIZE, GPT2, RandomWeights, decode_plan

from ppserve.core.architecture import StageLayout
from ppserve.core.plan import StepPlan
from ppserve.core.request import SamplingParams
from ppserve.model.backend import AttentionParts, KVCache, MLPParts
from ppserve.model.cpu.backend import CpuBackend
from ppserve.model.gpt2 import GPT2Stage
from ppserve.model.inputs import build_inputs
from ppserve.stage.transport.gather import NoTensorLink, TensorLink, connect_ranks, pretend_ranks

MOST_ROWS, CONTEXT = 64, 96


class ByOperators(CpuBackend):
    """Nothing is fused."""

    def fused_attention(self, parts: AttentionParts) -> None:
        return None

    def fused_mlp(self, parts: MLPParts) -> None:
        return None


@dataclass(frozen=True)
class Rank:
    stage: GPT2Stage
    cache: KVCache
    gather: TensorLink

    def step(self, plan: StepPlan) -> None:
        with torch.inference_mode():
            inputs = build_inputs(plan, self.stage.layout, self.cache, self.gather)
            self.stage.read_out(inputs, self.stage.forward(inputs, None, self.cache))()


def ranks(
    dtype: str, threads: int, count: int, kind: type[CpuBackend], num_layers: int, alone: bool
) -> list[Rank]:
    arch = replace(GPT2, num_layers=num_layers)
    links: tuple[TensorLink, ...] = connect_ranks(count) if count > 1 else (NoTensorLink(),)
    if alone and count > 1:
        links = (pretend_ranks(0, count),)
    made = []
    for rank, link in enumerate(links):
        layout, backend = StageLayout(0, 1, 0, 2 * num_layers, rank, count), kind(dtype, threads)
        num_blocks = MOST_ROWS * -(-(CONTEXT + 1) // BLOCK_SIZE)
        stage = GPT2Stage.load(RandomWeights(arch), layout, backend)
        made.append(Rank(stage, backend.make_cache(arch, layout, num_blocks, BLOCK_SIZE), link))
    return made


@click.command()
@click.option("--dtype", default="float32", type=click.Choice(["float32", "bfloat16"]))
@click.option("--seconds", default=4.0, help="Time for each number of rows.")
@click.option("--layers", default=GPT2.num_layers)
@click.option("--alone", is_flag=True, help="One rank of two by itself, and its thread's own time.")
def main(dtype: str, seconds: float, layers: int, alone: bool) -> None:
    torch.set_num_threads(1)
    kinds = {
        "1 thread": (1, 1, CpuBackend),
        "2 threads": (2, 1, CpuBackend),
        "2 tensor ranks": (1, 2, CpuBackend),
        "by operators": (1, 2, ByOperators),
    }
    if alone:
        del kinds["2 threads"]
    stages = {name: ranks(dtype, *how, layers, alone) for name, how in kinds.items()}
    clock = time.thread_time if alone else time.perf_counter
    with ThreadPoolExecutor(2) as pool:
        call = map if alone else pool.map
        for num_rows in (1, 8, 16, MOST_ROWS):
            plan = decode_plan(num_rows, CONTEXT, SamplingParams(temperature=0))
            best, waited = dict.fromkeys(stages, float("inf")), dict.fromkeys(stages, 0.0)
            until = time.monotonic() + seconds
            while time.monotonic() < until or float("inf") in best.values():
                for name, of in stages.items():
                    before_ns, begun = sum(rank.gather.waited_ns for rank in of), clock()
                    list(call(Rank.step, of, [plan] * len(of)))
                    took = clock() - begun
                    if took < best[name]:
                        best[name] = took
                        waited[name] = (sum(rank.gather.waited_ns for rank in of) - before_ns) / len(of) / 1e9
            figures = (
                f"{name} {1e3 * took:.1f} ms" + f" (waiting {1e3 * waited[name]:.1f})" * (waited[name] > 0)
                for name, took in best.items()
            )
            print(f"{num_rows:3} rows: {', '.join(figures)}", flush=True)


if __name__ == "__main__":
    main()
