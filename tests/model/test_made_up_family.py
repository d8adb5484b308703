"""A third family costs what docs/contributing/family.md says: one file and two tables (`made_up_family.py`).

A brook is neither a GPT-2 nor a Llama: it has post-norms, a window in every second layer, two rotary bases, and a
scaled embedding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ppserve.errors import CheckpointError
from ppserve.model.checkpoint.families import FAMILIES
from ppserve.model.checkpoint.opening import open_checkpoint
from tests.model.checkpoint.writers import random_tensors, stored_name, write_gguf
from tests.model.made_up_family import FAMILY, BrookConfig
from tests.model.pipelines import Pipeline, prompt
from tests.reference import Reference

ARCH = BrookConfig(
    model_type="brook", rows=64, width=48, depth=3, heads=4, num_key_value_heads=2, length=96,
    intermediate_size=88, epsilon=1e-5, eos_token_id=7,
).architecture(Path())  # fmt: skip


@pytest.fixture(autouse=True)
def _with_an_entry() -> Iterator[None]:
    FAMILIES["brook"] = FAMILY
    yield
    del FAMILIES["brook"]


def write_hugging_face(directory: Path, **more: object) -> Path:
    config = {"model_type": "brook", "rows": 64, "width": 48, "num_hidden_layers": 3, "heads": 4, "length": 96}
    config |= {"num_key_value_heads": 2, "intermediate_size": 88, "epsilon": 1e-5, "eos_token_id": 7}
    (directory / "config.json").write_text(json.dumps(config | more))
    tensors = {stored_name("brook", name, 0, "brook.bends."): of for name, of in random_tensors(ARCH).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_as_gguf(directory: Path) -> Path:
    return write_gguf(directory / "model.gguf", ARCH, random_tensors(ARCH), model="brook")


@pytest.mark.parametrize("write", [write_hugging_face, write_as_gguf])
def test_a_third_family_is_three_tables(tmp_path: Path, write: object) -> None:
    assert callable(write)
    checkpoint = open_checkpoint(str(write(tmp_path)))
    assert checkpoint.architecture == ARCH
    pipeline, ids = Pipeline(checkpoint, "1.5,1.5", num_sequences=1), prompt(40, vocab_size=64)
    logits = pipeline.logits(pipeline.hidden(ids, 13))
    torch.testing.assert_close(logits, Reference(checkpoint).logits(ids), atol=1e-4, rtol=1e-4)
    assert logits.std() > 0.5, "logits too close together to tell a wrong model from a right one"


def test_its_unknown_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rapids"):
        open_checkpoint(str(write_hugging_face(tmp_path, rapids=3)))
