"""Against transformers: what save_pretrained writes is read back, tensor by tensor, field by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ppserve.model.checkpoint import Checkpoint, tensor_shapes
from ppserve.model.checkpoint.opening import open_checkpoint

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 40, "vocab_size": 101}


def make(changes: dict[str, Any], cls: type = transformers.GPT2LMHeadModel) -> Any:
    torch.manual_seed(0)
    model = cls(transformers.GPT2Config(**SMALL | {"eos_token_id": 100, "bos_token_id": 100} | changes)).eval()
    for parameter in model.parameters():  # fresh biases are zero and fresh norms one: no test of order
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def check(checkpoint: Checkpoint, model: Any) -> None:
    config, arch = model.config, checkpoint.architecture
    assert arch.eos_id == config.eos_token_id
    body = getattr(model, "transformer", model)
    for i, block in enumerate(body.h):
        assert arch.attention_scale(i) == pytest.approx(block.attn.scaling, rel=1e-12)
    state = body.state_dict()
    head = model.lm_head.weight if hasattr(model, "lm_head") else body.wte.weight
    for name in tensor_shapes(arch):
        theirs = head if name == "lm_head.weight" else state[name]
        is_conv1d = ".c_" in name and name.endswith("weight")
        assert torch.equal(checkpoint.tensor(name), theirs.T if is_conv1d else theirs), name


def test_a_model_without_a_head_class(tmp_path: Path) -> None:
    """GPT2Model saves names without `transformer.`, and is tied."""
    model = make({}, transformers.GPT2Model)
    model.save_pretrained(tmp_path)
    check(open_checkpoint(str(tmp_path)), model)


@pytest.mark.parametrize("as_zip", [True, False])
def test_an_old_pytorch_model(tmp_path: Path, as_zip: bool) -> None:
    """A state dict as transformers 4 saved it: the head beside the embedding it is tied to, and mask buffers."""
    model = make({})
    state = dict(model.state_dict())
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    for i in range(2):
        state[f"transformer.h.{i}.attn.bias"] = torch.ones(40, 40, dtype=torch.uint8).tril()[None, None]
        state[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    model.config.save_pretrained(tmp_path)
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=as_zip)
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.architecture.tied_embeddings
    check(checkpoint, model)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", ["both alike", "both, different", "head only"])
def test_tying_is_settled_as_transformers_does(tmp_path: Path, tied: bool, stored: str) -> None:
    from safetensors.torch import load_file, save_file

    make({}).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    embedding = state["transformer.wte.weight"]
    state["lm_head.weight"] = embedding.clone() if stored == "both alike" else torch.randn_like(embedding)
    if stored == "head only":
        del state["transformer.wte.weight"]
    save_file(state, path, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if stored == "head only" and not tied:  # transformers makes up an embedding; we do not
        with pytest.raises(Exception, match=r"wte\.weight"):
            open_checkpoint(str(tmp_path))
        return
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    check(open_checkpoint(str(tmp_path)), model)
