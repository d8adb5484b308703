"""Served over 1, 2 and 3 stages, every format and field gives the numbers of its authors' code.

PPSERVE_PARITY=100,64 does the same at full length: prompts, and tokens of each answer.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ppserve.core.architecture import Architecture
from ppserve.core.plan import Draw
from ppserve.core.request import SamplingParams
from ppserve.errors import CheckpointError
from ppserve.model.checkpoint.families import tensor_shapes
from ppserve.model.checkpoint.opening import open_checkpoint
from tests.model.checkpoint.parity import SIZES, SPLITS, VARIANTS, check
from tests.model.checkpoint.writers import Tensors, architecture, random_tensors, write_llmc, write_nanogpt
from tests.model.pipelines import Pipeline, prompt

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_format_and_field(tmp_path: Path, variant: str) -> None:
    num_prompts, num_tokens = map(int, os.environ.get("PPSERVE_PARITY", "2,12").split(","))
    authored = VARIANTS[variant](tmp_path)
    for split in SPLITS:
        check(authored, split, num_prompts, num_tokens)


def padded_model() -> tuple[Architecture, Tensors]:
    """Every real logit near -70, every row of the padding at 0."""
    arch = architecture(**SIZES, padded_vocab_size=256)
    tensors = random_tensors(arch)
    tensors["ln_f.weight"][0], tensors["ln_f.bias"][0] = 0, 70  # the last hidden state's first number is 70 ...
    tensors["wte.weight"][:211, 0] = -1  # ... which every real token weighs with -1 ...
    tensors["wte.weight"][211:] = 0  # ... and the padding with nothing
    return arch, tensors


@pytest.mark.parametrize("split", SPLITS)
def test_the_padding_is_never_drawn(tmp_path: Path, split: str) -> None:
    arch, tensors = padded_model()
    draw = Draw(SamplingParams(temperature=1.5, seed=3))

    def pipeline(arch: Architecture) -> Pipeline:
        path = write_llmc(tmp_path / f"{arch.vocab_size}.bin", arch, tensors)
        return Pipeline(open_checkpoint(str(path)), split, num_sequences=1)

    control = pipeline(replace(arch, vocab_size=256)).generate(prompt(6), 8, draw)
    assert all(drawn.token_id is not None and drawn.token_id >= 211 for drawn in control)
    padded = pipeline(arch)
    logits = padded.logits(padded.hidden(prompt(20), 20))
    assert -80 < float(logits.mean()) < -60
    assert logits.shape == (20, 211)
    tokens = [drawn.token_id for drawn in padded.generate(prompt(6), 60, draw)]
    assert all(token is not None and token < 211 for token in tokens)
    assert len(set(tokens)) > 20


def test_the_padding_of_a_50304_row_embedding_is_known(tmp_path: Path) -> None:
    """nanoGPT pads GPT-2's vocabulary and says so nowhere."""
    arch = architecture(num_layers=1, width=8, num_heads=2, inner_width=32, vocab_size=50304, activation="gelu")
    checkpoint = open_checkpoint(str(write_nanogpt(tmp_path / "ckpt.pt", arch, random_tensors(arch))))
    found = checkpoint.architecture
    assert (found.vocab_size, found.padded_vocab_size, found.eos_id) == (50257, 50304, 50256)
    pipeline = Pipeline(checkpoint, "1", num_sequences=1)
    assert pipeline.logits(torch.zeros(1, 8)).shape == (1, 50257)


CONFIG = transformers.GPT2Config(
    n_layer=2, n_embd=32, n_head=4, n_positions=40, vocab_size=101, eos_token_id=100, bos_token_id=100
)


def make(cls: type = transformers.GPT2LMHeadModel) -> Any:
    torch.manual_seed(0)
    model = cls(CONFIG).eval()
    for parameter in model.parameters():  # fresh biases are zero and fresh norms one: no test of order
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def check_tensors(directory: Path, model: Any) -> None:
    """Opened, the directory holds the tensors of the model."""
    checkpoint = open_checkpoint(str(directory))
    assert checkpoint.architecture.eos_id == 100
    body = getattr(model, "transformer", model)
    head = model.lm_head.weight if hasattr(model, "lm_head") else body.wte.weight
    theirs = body.state_dict() | {"lm_head.weight": head}
    for name in tensor_shapes(checkpoint.architecture):
        is_conv1d = ".c_" in name and name.endswith("weight")
        assert torch.equal(checkpoint.tensor(name), theirs[name].T if is_conv1d else theirs[name]), name


def test_a_model_without_a_head_class(tmp_path: Path) -> None:
    """GPT2Model saves names without `transformer.`, and is tied."""
    model = make(transformers.GPT2Model)
    model.save_pretrained(tmp_path)
    check_tensors(tmp_path, model)


@pytest.mark.parametrize("as_zip", [True, False])
def test_an_old_pytorch_model(tmp_path: Path, as_zip: bool) -> None:
    """A state dict as transformers 4 saved it: the head beside the embedding it is tied to, and mask buffers."""
    model = make()
    state = dict(model.state_dict())
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    for i in range(2):
        state[f"transformer.h.{i}.attn.bias"] = torch.ones(40, 40, dtype=torch.uint8).tril()[None, None]
        state[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    model.config.save_pretrained(tmp_path)
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=as_zip)
    assert open_checkpoint(str(tmp_path)).architecture.tied_embeddings
    check_tensors(tmp_path, model)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", ["both alike", "both, different", "head only"])
def test_tying_is_settled_as_transformers_does(tmp_path: Path, tied: bool, stored: str) -> None:
    make().save_pretrained(tmp_path)
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
    check_tensors(tmp_path, transformers.GPT2LMHeadModel.from_pretrained(tmp_path))
