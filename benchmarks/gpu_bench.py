"""What the sections of gpu_stage.py share: where figures go, models, and a whole model as one stage on a GPU."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.kernels import GPT2, RandomWeights
from ppserve.core.architecture import Architecture, StageLayout
from ppserve.core.plan import Draw, Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.model.backend import KVCache, StageModel
from ppserve.model.cuda.backend import CudaBackend, DeviceOptions
from ppserve.model.gpt2 import GPT2Stage
from ppserve.model.inputs import build_inputs

XL = Architecture(48, 1600, 25, 1024, 50257, 50257, 6400)
SMALL = Architecture(2, 64, 4, 128, 211, 211, 256)
BLOCK = 16
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
