"""One stage on a GPU, with random weights, and the figures that a section of `gpu.py` notes about it."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.core.plan import Draw, Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.model.cuda.backend import CudaBackend, DeviceOptions
from ppserve.model.decoder import load_stage
from ppserve.model.inputs import build_inputs
from tests.architectures import gpt2 as gpt2_architecture
from tests.architectures import llama as llama_architecture
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
