"""A third family costs what docs/contributing/family.md says: all of it is here, with what shows that it works.

A brook is neither a GPT-2 nor a Llama: RMS norms, learned positions, grouped heads, an MLP of relu without a gate.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ppserve.core.architecture import Architecture
from ppserve.errors import CheckpointError
from ppserve.model import gpt2, llama
from ppserve.model.checkpoint import Shapes, settings
from ppserve.model.checkpoint.families import FAMILIES
from ppserve.model.checkpoint.family import Config, ModelFamily
from ppserve.model.checkpoint.opening import open_checkpoint
from ppserve.model.decoder import ModelParts
from tests.model.checkpoint.writers import random_tensors, stored_name, write_gguf
from tests.model.pipelines import Pipeline, prompt
from tests.reference import Reference

# ---- what would be ppserve/model/brook.py


PARTS = ModelParts(gpt2.PARTS.embedding, llama.PARTS.attention, gpt2.PARTS.mlp)

# ---- and ppserve/model/checkpoint/brook.py


class BrookConfig(Config, frozen=True, kw_only=True):
    rows: settings.Rows
    width: settings.Width
    depth: settings.Layers
    heads: settings.Width
    num_key_value_heads: settings.Width
    length: settings.Positions
    intermediate_size: settings.InnerWidth
    epsilon: float

    def architecture(self, path: Path) -> Architecture:
        return Architecture(
            family="brook",
            num_layers=self.depth,
            width=self.width,
            num_heads=self.heads,
            kv_heads=self.num_key_value_heads,
            max_positions=self.length,
            vocab_size=self.rows,
            padded_vocab_size=self.rows,
            inner_width=self.intermediate_size,
            activation="relu",
            layer_norm_epsilon=self.epsilon,
            tied_embeddings=False,
            biases=False,
            eos_ids=self.eos_ids,
        )


def _layer_shapes(arch: Architecture) -> Shapes:
    width, inner, keys = arch.width, arch.inner_width, arch.num_kv_heads * arch.head_size
    return {
        **{f"{name}.weight": (width,) for name in ("ln_1", "ln_2")},
        **{f"attn.{name}.weight": (width, width) for name in "qo"},
        **{f"attn.{name}.weight": (keys, width) for name in "kv"},
        "mlp.c_fc.weight": (inner, width),
        "mlp.c_proj.weight": (width, inner),
    }


FAMILY = ModelFamily(
    model_types=("brook",),
    module=__name__,
    config=BrookConfig,
    synonyms={
        "vocab_size": "rows",
        "hidden_size": "width",
        "num_hidden_layers": "depth",
        "num_attention_heads": "heads",
        "max_position_embeddings": "length",
    },
    gguf_keys={"attention.layer_norm_rms_epsilon": "epsilon"},
    has_rms_norms=True,
    layer_shapes=_layer_shapes,
    names={
        "wte": ("spring", "token_embd"),
        "wpe": ("places", "position_embd"),
        "ln_f": ("last", "output_norm"),
        "lm_head": ("mouth", "output"),
        "ln_1": ("calm", "attn_norm"),
        **{f"attn.{name}": (f"look.{name}", f"attn_{name}") for name in "qkv"},
        "attn.o": ("look.o", "attn_output"),
        "ln_2": ("still", "ffn_norm"),
        "mlp.c_fc": ("rise", "ffn_up"),
        "mlp.c_proj": ("fall", "ffn_down"),
    },
    layers="brook.bends.",
)

# ---- with its entry, it is served.

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
