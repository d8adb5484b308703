"""The families of models: a stage's part of one, from any checkpoint."""

from __future__ import annotations

import torch

from ppserve.core.architecture import StageLayout
from ppserve.model.backend import Backend
from ppserve.model.checkpoint import Checkpoint
from ppserve.model.decoder import Decoder
from ppserve.model.gpt2 import GPT2
from ppserve.model.llama import LLAMA
from ppserve.model.weights import Progress, WeightReader

FAMILIES = {"gpt2": GPT2, "llama": LLAMA}
"""By `Architecture.family`."""


def load_stage(
    checkpoint: Checkpoint,
    layout: StageLayout,
    backend: Backend,
    progress: Progress = lambda done, total: None,
) -> Decoder:
    """Read a stage's tensors, one at a time, and pack them. Raises CheckpointError."""
    family = FAMILIES[checkpoint.architecture.family]
    with torch.inference_mode():
        return Decoder(WeightReader(checkpoint, layout, backend, progress), family)
