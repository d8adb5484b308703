"""Served over 1, 2 and 3 stages, every format and field gives the numbers of its authors' code.

The same at full length (100 prompts of 64 tokens) is run by hand: benchmarks/checkpoints.py parity.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ppserve.core.architecture import Architecture
from ppserve.core.plan import Draw
from ppserve.core.request import SamplingParams
from ppserve.model.checkpoint.opening import open_checkpoint
from tests.model.checkpoint.parity import SPLITS, VARIANTS, MemoryCheckpoint, check
from tests.model.checkpoint.writers import (
    Tensors,
    architecture,
    random_tensors,
    write_llmc,
    write_nanogpt,
)
from tests.model.pipelines import Pipeline, prompt

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_format_and_field(tmp_path: Path, variant: str) -> None:
    authored = VARIANTS[variant](tmp_path)
    for split in SPLITS:
        check(authored, split, num_prompts=2, num_tokens=12)


def padded_model() -> tuple[Architecture, Tensors]:
    """Every real logit near -70, every row of the padding at 0."""
    arch = architecture(width=40, inner_width=160, max_positions=96, vocab_size=211, padded_vocab_size=256)
    tensors = random_tensors(arch)
    tensors["ln_f.weight"][0], tensors["ln_f.bias"][0] = 0, 70  # the last hidden state's first number is 70 ...
    tensors["wte.weight"][:211, 0] = -1  # ... which every real token weighs with -1 ...
    tensors["wte.weight"][211:] = 0  # ... and the padding with nothing
    return arch, tensors


@pytest.mark.parametrize("split", SPLITS)
def test_the_padding_is_never_drawn(tmp_path: Path, split: str) -> None:
    arch, tensors = padded_model()
    draw = Draw(SamplingParams(temperature=1.5, seed=3))
    whole = replace(arch, vocab_size=256)
    control = Pipeline(MemoryCheckpoint(whole, tensors), split, num_sequences=1)
    assert all(d.token_id is not None and d.token_id >= 211 for d in control.generate(prompt(6), 8, draw))
    path = write_llmc(tmp_path / "model.bin", arch, tensors)
    pipeline = Pipeline(open_checkpoint(str(path)), split, num_sequences=1)
    logits = pipeline.logits(pipeline.hidden(prompt(20), 20))
    assert -80 < float(logits.mean()) < -60
    assert logits.shape == (20, 211)
    drawn = [d.token_id for d in pipeline.generate(prompt(6), 60, draw)]
    assert all(token is not None and token < 211 for token in drawn)
    assert len(set(drawn)) > 20


def test_the_padding_of_a_50304_row_embedding_is_known(tmp_path: Path) -> None:
    """nanoGPT pads GPT-2's vocabulary and says so nowhere."""
    arch = architecture(num_layers=1, width=8, num_heads=2, inner_width=32, vocab_size=50304, activation="gelu")
    path = write_nanogpt(tmp_path / "ckpt.pt", arch, random_tensors(arch))
    found = open_checkpoint(str(path)).architecture
    assert (found.vocab_size, found.padded_vocab_size, found.eos_id) == (50257, 50304, 50256)
    pipeline = Pipeline(open_checkpoint(str(path)), "1", num_sequences=1)
    assert pipeline.logits(torch.zeros(1, 8)).shape == (1, 50257)
