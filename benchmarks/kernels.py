"""The matrix products of GPT-2 124M's layers, ours beside oneDNN's, per precision, kernel and number of rows.

    OMP_NUM_THREADS=1 python benchmarks/kernels.py [--rows 1,8,16] [--precision int8] [--best] [--rounds 15]
    OMP_NUM_THREADS=1 python benchmarks/kernels.py --activations

Contenders take turns and the table has the least time of all rounds, in milliseconds for the 48 products of 12
layers, with what that is in GFLOP/s and in GB/s of weights, and the time that each of the machine's limits allows:
reading the weights once at the speed of memory, and the arithmetic at the speed of torch's best large product (of
int8 twice bfloat16's, of float32 at least half of it). The last column is the greater limit's share of the time.
One thread, on its own CPU time, so that a busy machine disturbs it less.

With --activations it measures those instead, each on 16 rows of 3072: microseconds.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests and tools are no packages of the environment

from ppserve.model.compiled.jit import kernel
from ppserve.model.compiled.lanes import load, splat, sum_lanes
from ppserve.model.cpu.activations import CpuActivation
from ppserve.model.cpu.huge_pages import HugePages
from ppserve.model.cpu.kernels.activation import activate_all
from ppserve.model.cpu.kernels.memory import address, aligned
from ppserve.model.cpu.kernels.products import PackedRows, micro_kernels
from ppserve.model.cpu.kernels.storage import Storage
from ppserve.model.cpu.kernels.tile_code import MicroKernel
from ppserve.model.cpu.kernels.variants import choose, features
from ppserve.model.cpu.weights import PackedWeights
from ppserve.model.stock import ACTIVATIONS
from tests.model.cpu.products import count_tile_rows, multiply_rows, pack_rows

LAYERS = 12
SHAPES = ((768, 2304), (768, 768), (768, 3072), (3072, 768))
WEIGHTS = LAYERS * sum(inputs * outputs for inputs, outputs in SHAPES)
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}

Contender = Callable[[], None]


def ours(kind: MicroKernel, precision: str, num_rows: int, layers: list[list[PackedWeights]]) -> Contender:
    """Packing the rows and multiplying them, for every matrix."""
    steps, inputs = kind.steps, kind.inputs
    tile_rows = count_tile_rows(kind, num_rows)
    padded = -(-num_rows // tile_rows) * tile_rows
    x, values = aligned((num_rows, 3072), np.float32), aligned(3072, np.float32)
    x[:] = np.random.default_rng(0).standard_normal(x.shape)
    words, scales = aligned(padded * 3072 * steps // inputs, np.int32), aligned(padded, np.float32)
    y = aligned((padded, 3072), np.float32)

    def multiply_all() -> None:
        rows = PackedRows(address(words), address(scales), num_rows, tile_rows)
        for layer in layers:
            for packed in layer:
                weights = packed.seen_by_kernels
                depth, chunks = packed.num_inputs, weights.chunks
                pack_rows(kind, Storage("float32"), address(x), depth, rows, chunks, address(values))
                multiply_rows(kind, weights, rows, address(y), 0, weights.outputs // 16)

    return multiply_all


def packed_layers(kind: MicroKernel, precision: str) -> list[list[PackedWeights]]:
    matrices = [torch.randn(outputs, inputs) * 0.02 for inputs, outputs in SHAPES]
    memory = HugePages()
    return [[PackedWeights(matrix, None, precision, kind, memory) for matrix in matrices] for _ in range(LAYERS)]


def onednn(dtype: torch.dtype, num_rows: int) -> Contender:
    packed = [
        [
            torch.ops.mkldnn._reorder_linear_weight(torch.randn(outputs, inputs).to(dtype), None)
            for inputs, outputs in SHAPES
        ]
        for _ in range(LAYERS)
    ]
    rows = [torch.randn(num_rows, inputs).to(dtype) for inputs, _ in SHAPES]

    def multiply_all() -> None:
        for layer in packed:
            for x, matrix in zip(rows, layer, strict=True):
                torch.ops.mkldnn._linear_pointwise(x, matrix, None, "none", [], "")

    return multiply_all


@kernel
def read_all(values, count) -> float:  # type: ignore[no-untyped-def]
    """The sum of `count` values at an address, in four chains."""
    a = b = c = d = splat(np.float32(0))
    for i in range(0, count, 64):
        a = a + load(values, i)
        b = b + load(values, i + 16)
        c = c + load(values, i + 32)
        d = d + load(values, i + 48)
    return sum_lanes((a + b) + (c + d))


def best_of(contenders: dict[str, Contender], rounds: int) -> dict[str, float]:
    """Least seconds of each; they take turns, and the first round does not count."""
    best = dict.fromkeys(contenders, float("inf"))
    for number in range(rounds + 1):
        for name, contender in contenders.items():
            begun = time.thread_time()
            contender()
            spent = time.thread_time() - begun
            if number:
                best[name] = min(best[name], spent)
    return best


def limits(rounds: int) -> dict[str, float]:
    """GB/s of reading, GFLOP/s of torch's product of 2048 x 2048 matrices."""
    memory = aligned(WEIGHTS, np.float32)
    memory[:] = 1.0
    contenders: dict[str, Contender] = {"read GB/s": lambda: read_all(address(memory), memory.size)}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        a, b = torch.randn(2048, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
        contenders[f"torch {name} GFLOP/s"] = lambda a=a, b=b: torch.matmul(a, b)  # type: ignore[misc]
    best = best_of(contenders, rounds)
    return {name: (memory.nbytes if "GB" in name else 2 * 2048**3) / best[name] / 1e9 for name in best}


def limits_of(machine: dict[str, float], precision: str, num_rows: int) -> tuple[float, float]:
    """Seconds to read the weights once, and to do the arithmetic."""
    bfloat16, float32 = machine["torch bfloat16 GFLOP/s"], machine["torch float32 GFLOP/s"]
    gflops = {"int8": 2 * bfloat16, "bfloat16": bfloat16, "float32": max(float32, bfloat16 / 2)}[precision]
    gbytes = WEIGHTS * WEIGHT_BYTES[precision] / 1e9
    return gbytes / machine["read GB/s"], 2 * WEIGHTS * num_rows / 1e9 / gflops


def name_of(kind: MicroKernel) -> str:
    return f"{kind.operation} {kind.rows[-1]}x{kind.panels}, {kind.lanes} slots"


def measure_activations(rounds: int) -> None:
    x, values = (aligned((16, 3072), np.float32) for _ in range(2))
    x[:] = np.random.default_rng(0).standard_normal(x.shape)

    def applying(name: str) -> Contender:
        activation = CpuActivation(name).seen_by_kernels

        def apply() -> None:
            values[:] = x
            activate_all(activation, address(values), values.size)

        return apply

    for name, seconds in best_of({name: applying(name) for name in ACTIVATIONS}, 20 * rounds).items():
        print(f"{name:18} {1e6 * seconds:7.1f}")


@click.command()
@click.option("--rows", default="1,2,4,8,16,32,64,128,512", help="numbers of rows, with commas")
@click.option("--precision", multiple=True, default=list(WEIGHT_BYTES))
@click.option("--best", is_flag=True, help="only the kernels that serving would use, without the others")
@click.option("--activations", is_flag=True, help="activations instead of products")
@click.option("--rounds", default=15)
@click.option("--json", "json_file", type=click.Path(path_type=Path))
def main(
    rows: str, precision: tuple[str, ...], best: bool, activations: bool, rounds: int, json_file: Path | None
) -> None:
    torch.set_num_threads(1)
    if activations:
        measure_activations(rounds)
        return
    machine = limits(rounds)
    print(", ".join(f"{name} {value:.0f}" for name, value in machine.items()))
    print(f"{'':45} ms  GFLOP/s   GB/s   by bytes  by arithmetic  reached")
    records = []
    for name in precision:
        able = micro_kernels(name, choose({}, features()), features())
        kinds = {name_of(kind): kind for kind in (able[:1] if best else able)}
        layers = {label: packed_layers(kind, name) for label, kind in kinds.items()}
        for num_rows in (int(count) for count in rows.split(",")):
            contenders = {label: ours(kind, name, num_rows, layers[label]) for label, kind in kinds.items()}
            if name != "int8" and not best:
                contenders["oneDNN"] = onednn(getattr(torch, name), num_rows)
            for label, seconds in best_of(contenders, rounds).items():
                gflops, gbytes = (
                    2 * WEIGHTS * num_rows / seconds / 1e9,
                    WEIGHTS * WEIGHT_BYTES[name] / seconds / 1e9,
                )
                by_bytes, by_arithmetic = limits_of(machine, name, num_rows)
                reached = max(by_bytes, by_arithmetic) / seconds
                print(
                    f"{name:9} {num_rows:5}  {label:28} {1e3 * seconds:7.2f} {gflops:8.0f} {gbytes:6.1f}"
                    f" {1e3 * by_bytes:10.2f} {1e3 * by_arithmetic:14.2f} {reached:8.0%}",
                    flush=True,
                )
                records.append(
                    {"precision": name, "rows": num_rows, "kernel": label, "milliseconds": 1e3 * seconds}
                )
    if json_file:
        document = {"machine": platform.processor(), "features": sorted(features()), "limits": machine}
        json_file.write_text(json.dumps(document | {"products": records}, indent=1))


if __name__ == "__main__":
    main()
