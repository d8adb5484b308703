"""Driving stages by hand: plans for one or many sequences, pushed through all stages in this process."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ppserve.core.architecture import Split, stage_layouts
from ppserve.core.plan import Draw, Drawn, Scored, Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.model.backend import Backend
from ppserve.model.checkpoint import Checkpoint
from ppserve.model.cpu.backend import CpuBackend
from ppserve.model.cuda.backend import CudaBackend
from ppserve.model.decoder import load_stage
from ppserve.model.inputs import build_inputs

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0)
GREEDY_DRAW = Draw(GREEDY)
BACKENDS: dict[str, Backend] = {
    "kernels": CpuBackend("float32"),
    "gpu reference": CudaBackend(CPU, "float32"),
}


class Pipeline:
    """All stages of a model, one after the other. Sequence i owns a run of blocks, in shuffled order."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        split: str,
        dtype: str = "float32",
        backend: Backend | None = None,
        block_size: int = 16,
        num_sequences: int = 12,
    ) -> None:
        backend = backend or CpuBackend(dtype)
        self.table_size = -(-checkpoint.architecture.max_positions // block_size)
        self.layouts = stage_layouts(Split.parse(split))
        self.stages = [load_stage(checkpoint, at, backend) for at in self.layouts]
        num_blocks = num_sequences * self.table_size
        self.caches = [
            backend.make_cache(checkpoint.architecture, at, num_blocks, block_size) for at in self.layouts
        ]

    def table(self, sequence: int) -> tuple[int, ...]:
        """The blocks of a sequence, deliberately not in order."""
        own = range(sequence * self.table_size, (sequence + 1) * self.table_size)
        return tuple(reversed(own))

    def slice(
        self, sequence: int, ids: tuple[int, ...], start: int, draw: Draw | None = None, **more: object
    ) -> Slice:
        return Slice(sequence, start, ids, self.table(sequence), draw, **more)  # type: ignore[arg-type]

    def step(self, slices: Iterable[Slice]) -> tuple[torch.Tensor, tuple[Drawn, ...], tuple[Scored, ...]]:
        """One step through all stages: last hidden states, drawn, scored."""
        plan = StepPlan(0, 0, 0, tuple(slices))
        hidden = None
        for layout, stage, cache in zip(self.layouts, self.stages, self.caches, strict=True):
            inputs = build_inputs(plan, layout, cache)
            hidden = stage.forward(inputs, hidden)
        assert hidden is not None
        return hidden, *self.stages[-1].read_out(inputs, hidden)()

    def hidden(self, ids: tuple[int, ...], chunk: int, sequence: int = 0) -> torch.Tensor:
        """Hidden states of a whole prompt, computed `chunk` tokens at a time."""
        starts = range(0, len(ids), chunk)
        return torch.cat([self.step([self.slice(sequence, ids[i : i + chunk], i)])[0] for i in starts])

    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        head = self.stages[-1].head
        assert head is not None
        with torch.inference_mode():
            return head.logits(hidden_TD).clone()

    def generate(
        self, prompt: tuple[int, ...], count: int, draw: Draw = GREEDY_DRAW, sequence: int = 0
    ) -> list[Drawn]:
        """`count` tokens after the prompt, one step each."""
        drawn = [self.step([self.slice(sequence, prompt, 0, draw)])[1][0]]
        while len(drawn) < count:
            at = len(prompt) + len(drawn) - 1
            last = drawn[-1].token_id
            assert last is not None
            drawn.append(self.step([self.slice(sequence, (last,), at, draw)])[1][0])
        return drawn


def prompt(count: int, seed: int = 0, vocab_size: int = 211) -> tuple[int, ...]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(vocab_size, (count,), generator=generator).tolist())
