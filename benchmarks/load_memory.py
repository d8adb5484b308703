"""What loading a stage costs, by hand: python benchmarks/load_memory.py [--stages 4] [--gigabytes 1]

Writes a GPT-2 of about a gigabyte, in four files, as safetensors and as pytorch_model.bin; then loads each
stage in a process of its own and compares the peak of its resident memory with what it holds in the end, and
with transformers' from_pretrained on the whole model. Nothing is left behind.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


def write_model(directory: Path, container: str, gigabytes: float) -> None:
    """GPT-2's vocabulary, 1024 wide, as many blocks as fit; four files and an index."""
    from tests.model.checkpoint.writers import architecture, random_tensors, write_hf

    layers = round((gigabytes * 2**30 - 51280 * 4096) / (12 * 1024 * 1024 * 4))
    arch = architecture(
        num_layers=layers, width=1024, num_heads=16, max_positions=1024, vocab_size=50257, inner_width=4096
    )
    tensors = random_tensors(arch)
    write_hf(directory, arch, tensors, container=container, parts=4)


def write_small_model(directory: Path, like: Path) -> None:
    """A tiny model in the same format."""
    from tests.model.checkpoint.writers import architecture, random_tensors, write_hf

    arch = architecture(num_layers=1)
    container = "safetensors" if any(like.glob("*.safetensors")) else "bin"
    write_hf(directory, arch, random_tensors(arch), container=container)


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status: VmRSS, VmHWM (its highest)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def measured(load: Callable[[], object]) -> dict[str, float]:
    """Load once; bytes above the start and seconds. The highest mark is reset before."""
    begin_bytes = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    begin_s = time.perf_counter()
    kept = load()
    seconds = time.perf_counter() - begin_s
    peak_bytes = _status("VmHWM") - begin_bytes
    return {"weight_bytes": getattr(kept, "weight_bytes", 0), "peak_bytes": peak_bytes, "seconds": seconds}


def load_stage(directory: str, stage: int, num_stages: int, dtype: str) -> dict[str, float]:
    from ppserve.core.architecture import Split, StageLayout, stage_layouts
    from ppserve.model.checkpoint.opening import open_checkpoint, read_architecture
    from ppserve.model.cpu.backend import CpuBackend
    from ppserve.model.gpt2 import GPT2Stage

    layers = read_architecture(directory).num_layers
    ends = [2 * (layers * i // num_stages) for i in range(num_stages + 1)]
    split = Split(tuple(end - begin for begin, end in pairwise(ends)))
    layout = stage_layouts(split)[stage]

    def load(place: str, layout: StageLayout) -> GPT2Stage:
        return GPT2Stage.load(open_checkpoint(place).rounded_to(dtype), layout, CpuBackend(dtype))

    with tempfile.TemporaryDirectory() as small:  # compiled kernels and libraries are no weights: have them before
        write_small_model(Path(small), like=Path(directory))
        load(small, StageLayout(0, 1, 0, 2))
    return measured(lambda: load(directory, layout))


def load_with_transformers(directory: str) -> dict[str, float]:
    from transformers import GPT2LMHeadModel

    def load() -> GPT2LMHeadModel:
        model = GPT2LMHeadModel.from_pretrained(directory)
        for parameter in model.parameters():  # it only maps the files: have them read, as we do
            parameter.sum()
        return model

    with tempfile.TemporaryDirectory() as small:
        write_small_model(Path(small), like=Path(directory))
        GPT2LMHeadModel.from_pretrained(small)
    return measured(load)


def in_a_process(*arguments: object) -> dict[str, float]:
    """Run this file with the arguments and return what it prints."""
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    measurement: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measurement


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    arguments = parser.parse_args()
    print("| format | what | weights MB | peak MB | over | load s |\n|---|---|---|---|---|---|")
    for container in ("safetensors", "bin"):
        with tempfile.TemporaryDirectory() as directory:
            write_model(Path(directory), container, arguments.gigabytes)
            whole_bytes = sum(path.stat().st_size for path in Path(directory).glob("*model-*"))
            for dtype in ("float32", "bfloat16"):
                for stage in range(arguments.stages):
                    m = in_a_process("stage", directory, stage, arguments.stages, dtype)
                    _print_row(container, f"stage {stage} of {arguments.stages}, {dtype}", m, m["weight_bytes"])
                m = in_a_process("stage", directory, 0, 1, dtype)
                _print_row(container, f"1 stage, {dtype}", m, m["weight_bytes"])
            _print_row(container, "transformers", in_a_process("transformers", directory), whole_bytes)


def _print_row(container: str, what: str, m: dict[str, float], weight_bytes: float) -> None:
    over = m["peak_bytes"] / weight_bytes - 1
    sizes = f"{weight_bytes / 2**20:.0f} | {m['peak_bytes'] / 2**20:.0f} | {over:+.1%}"
    print(f"| {container} | {what} | {sizes} | {m['seconds']:.2f} |", flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["stage", directory, stage, num_stages, dtype]:
            print(json.dumps(load_stage(directory, int(stage), int(num_stages), dtype)))
        case ["transformers", directory]:
            print(json.dumps(load_with_transformers(directory)))
        case _:
            main()
