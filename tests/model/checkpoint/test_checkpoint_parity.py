"""Served over 1, 2 and 3 stages, every format and field gives the numbers of its authors' code.

PPSERVE_PARITY=100,64 does the same at full length: prompts, and tokens of each answer.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ppserve.errors import CheckpointError
from ppserve.model.checkpoint.opening import open_checkpoint
from tests.model.checkpoint.parity import SPLITS, VARIANTS, Authored, check, hugging_face
from tests.model.checkpoint.writers import architecture, random_tensors, write_nanogpt
from tests.model.pipelines import Pipeline

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_format_and_field(tmp_path: Path, variant: str) -> None:
    num_prompts, num_tokens = map(int, os.environ.get("PPSERVE_PARITY", "2,12").split(","))
    authored = VARIANTS[variant](tmp_path)
    for split in SPLITS:
        check(authored, split, num_prompts, num_tokens)


@pytest.mark.parametrize(("width", "inner", "head"), [(256, 512, 32), (64, 96, 32), (512, 1024, 64)])
def test_four_readers_of_a_head_for_whom_no_tile_has_as_many_rows(
    tmp_path: Path, width: int, inner: int, head: int
) -> None:
    """Tiles of attention have 1, 3 or 6 on CPUs: what the last one fills up is memory that is there."""
    of = {"hidden_size": width, "intermediate_size": inner, "head_dim": head}
    authored = hugging_face(tmp_path, model="Llama", num_attention_heads=8, num_key_value_heads=2, **of)
    for split in ("2,1", "1.5,1.5", "1,2"):
        check(authored, split, num_prompts=1, num_tokens=8)


def test_the_padding_of_a_50304_row_embedding_is_known(tmp_path: Path) -> None:
    """nanoGPT pads GPT-2's vocabulary and says so nowhere."""
    arch = architecture(num_layers=1, width=8, num_heads=2, inner_width=32, vocab_size=50304, activation="gelu")
    checkpoint = open_checkpoint(str(write_nanogpt(tmp_path / "ckpt.pt", arch, random_tensors(arch))))
    found = checkpoint.architecture
    assert (found.vocab_size, found.padded_vocab_size, found.eos_id) == (50257, 50304, 50256)
    pipeline = Pipeline(checkpoint, "1", num_sequences=1)
    assert pipeline.logits(torch.zeros(1, 8)).shape == (1, 50257)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", ["both alike", "both, different", "head only"])
def test_tying_is_settled_as_transformers_does(tmp_path: Path, tied: bool, stored: str) -> None:
    hugging_face(tmp_path)
    path, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    state = load_file(path)
    embedding = state["transformer.wte.weight"]
    state["lm_head.weight"] = embedding.clone() if stored == "both alike" else torch.randn_like(embedding)
    if stored == "head only":
        del state["transformer.wte.weight"]
    save_file(state, path, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": tied}))
    if stored == "head only" and not tied:  # transformers makes up an embedding; we do not
        with pytest.raises(CheckpointError, match=r"wte\.weight"):
            open_checkpoint(str(tmp_path))
        return
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    check(Authored(tmp_path, lambda ids: theirs(torch.tensor([ids])).logits[0].detach()), "3", 1, 4)
