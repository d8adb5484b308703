"""A bare pipeline without a server: stages with their caches and transports, and the steps that they compute.

T tokens, D width, B sequences, m microbatches.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ppserve.library import (
    Architecture,
    Checkpoint,
    Computed,
    DeviceSetup,
    Draw,
    Frames,
    GPT2Config,
    SamplingParams,
    Slice,
    Split,
    Stage,
    StageLayout,
    StepPlan,
    TensorPart,
    Transport,
    connect,
    stage_layouts,
)
from tour.ranks import Tour

BLOCK_SIZE = 16
BLOCKS_PER_SEQUENCE = 8
MAX_SEQUENCES = 16
_GREEDY = SamplingParams(temperature=0.0)

# GPT-2 124M at half its width: its proportions (the LM head weighs 5.45 layers) at a quarter of its work.
PRACTICE_MODEL = GPT2Config(n_layer=12, n_embd=384, n_head=6, vocab_size=25128, eos_token_id=None).architecture(
    Path()
)


@dataclass(slots=True)
class RandomWeights(Checkpoint):
    """A `Checkpoint` of any architecture without a file: each weight is drawn at random, by its name, when it is
    read."""

    architecture: Architecture
    path: Path = Path("random weights")
    stored_dtype: str = "float32"

    def tensor(self, name: str, part: TensorPart | None = None) -> torch.Tensor:
        whole = self._whole(name)
        return whole if part is None else part.select(whole)

    def _whole(self, name: str) -> torch.Tensor:
        part, kind = name.removeprefix("h.").lstrip("0123456789.").rsplit(".", 1)
        if part.startswith("ln_"):
            return torch.full((self.architecture.width,), float(kind == "weight"))
        shape = self._shape(part)
        if kind == "bias":
            return torch.zeros(shape[0])
        source = "wte.weight" if part == "lm_head" else name
        generator = torch.Generator().manual_seed(zlib.crc32(source.encode()))
        return torch.empty(shape).uniform_(-0.06, 0.06, generator=generator)

    def _shape(self, part: str) -> tuple[int, int]:
        """Return a weight's shape: (out, in) of a linear layer, (rows, D) of an embedding."""
        arch, d, f = self.architecture, self.architecture.width, self.architecture.inner_width
        shapes = {"attn.qkv": (3 * d, d), "attn.o": (d, d), "mlp.up": (f, d), "mlp.down": (d, f)}
        rows = arch.max_positions if part == "wpe" else arch.padded_vocab_size
        return shapes.get(part, (rows, d))


class TourStage:
    """One stage of a bare pipeline: its layers, its keys and values, and its transport to the neighbours."""

    def __init__(
        self, checkpoint: Checkpoint, layout: StageLayout, device: torch.device, transport: Transport
    ) -> None:
        self.layout = layout
        self.device = device
        setup = DeviceSetup(device, "float32", stages_here=1, threads=torch.get_num_threads())
        backend = setup.backend()
        self.model = backend.load(checkpoint, layout)
        self.kv_bytes_per_token = backend.block_bytes(self.model.arch, layout, BLOCK_SIZE) / BLOCK_SIZE
        self._stage = Stage(self.model.with_cache(MAX_SEQUENCES * BLOCKS_PER_SEQUENCE, BLOCK_SIZE), transport)

    @classmethod
    def of(cls, tour: Tour, checkpoint: Checkpoint, split: Split) -> TourStage:
        """Load this rank's stage of the model, and connect it to its neighbours."""
        transport = tour.connect(checkpoint.architecture.width)
        return cls(checkpoint, stage_layouts(split)[tour.rank], tour.device, transport)

    @classmethod
    def whole(cls, tour: Tour, checkpoint: Checkpoint) -> TourStage:
        """Load the whole model as one stage without neighbours."""
        arch = checkpoint.architecture
        (transport,) = connect((Frames(arch.width, torch.float32),))
        return cls(checkpoint, StageLayout(0, 1, 0, 2 * arch.num_layers), tour.device, transport)

    def run(self, plans: Sequence[StepPlan]) -> list[Computed]:
        """Compute these steps in order, and return their results."""
        for plan in plans:
            self._stage.expect(plan)
        return [self._stage.step(plan, time.monotonic_ns()) for plan in plans]

    def close(self) -> None:
        self._stage.transport.close()


def even_split(arch: Architecture, num_stages: int) -> Split:
    """Return the split by which every stage has the same number of layers, or one more."""
    each, more = divmod(arch.num_layers, num_stages)
    return Split(tuple(2 * (each + 1 if stage < more else each) for stage in range(num_stages)))


def slice_of(sequence: int, start: int, token_ids: Sequence[int], draws: bool = False) -> Slice:
    """Return a slice of consecutive tokens of a sequence. Each sequence always has the same BLOCKS_PER_SEQUENCE
    blocks, because no sequence here ever ends."""
    first = sequence * BLOCKS_PER_SEQUENCE
    table = tuple(range(first, first + BLOCKS_PER_SEQUENCE))
    return Slice(sequence, start, tuple(token_ids), table, Draw(_GREEDY) if draws else None)


def microbatches(prompts: Sequence[Sequence[int]], m: int) -> list[StepPlan]:
    """Return m steps that compute all prompts, with equally many prompts in each. m divides their number."""
    share = len(prompts) // m
    shares = [range(k * share, (k + 1) * share) for k in range(m)]
    return [StepPlan(1, k, k, tuple(slice_of(s, 0, prompts[s]) for s in own)) for k, own in enumerate(shares)]
