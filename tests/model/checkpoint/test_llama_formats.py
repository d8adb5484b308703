"""Configs and files of Llamas and their kin: what is read, and what is refused by name."""

from __future__ import annotations

import json
import os
import struct
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ppserve.errors import CheckpointError, ConfigError
from ppserve.model.checkpoint import TensorPart
from ppserve.model.checkpoint.families import tensor_shapes
from ppserve.model.checkpoint.opening import open_checkpoint, read_architecture
from ppserve.model.cpu.backend import CpuBackend
from tests.model.checkpoint.parity import LLAMA_3, LLAMA_SIZES, hugging_face
from tests.model.checkpoint.writers import random_tensors, write_gguf, write_hf_state
from tests.model.pipelines import Pipeline, prompt
from tests.model.random_checkpoint import llama

save = partial(hugging_face, model="Llama")
"""A random model as transformers saves it."""


def test_keys_of_older_files_mean_the_same(tmp_path: Path) -> None:
    save(tmp_path, rope_parameters=LLAMA_3 | {"rope_theta": 5000.0})
    found = read_architecture(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    scaling = dict(LLAMA_3)
    config |= {"rope_theta": 5000.0, "rope_scaling": {"type": scaling.pop("rope_type"), **scaling}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_architecture(str(tmp_path)) == found


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "rope_type"),
        ({"rope_scaling": LLAMA_3 | {"low_freq_factor": 4.0}}, "high_freq_factor above low_freq_factor"),
        ({"rope_parameters": {"rope_theta": 0.0}}, "rope_theta: is 0.0, not from"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"num_key_value_heads": 4}, "heads of keys and values do not divide"),
        ({"hidden_act": "sigmoid"}, "hidden_act"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"head_dim": 7}, "head_dim"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "nan"}}, "rope_scaling.factor: is nan, not from"),
        ({"model_type": "gemma"}, "served are gpt2, llama, mistral, qwen2, qwen3"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], field: str, tmp_path: Path) -> None:
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=field):
        read_architecture(str(tmp_path))


@pytest.mark.parametrize(
    ("of", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 40}, (40, 40, 40)),
        ({"model_type": "mistral"}, (4096, 4096, 4096)),
        ({"model_type": "mistral", "sliding_window": 9000}, (None, None, None)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None, None)),
        ({"model_type": "qwen2", "sliding_window": 40}, (None, None, None)),
        ({"model_type": "qwen2", "use_sliding_window": True}, (None, None, None)),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2}, (None, None, 4096)),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            },
            (4096, None, None),
        ),
    ],
)
def test_a_layer_has_the_window_that_it_has_in_transformers(
    of: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    config = {**LLAMA_SIZES, "num_hidden_layers": 3, "max_position_embeddings": 9000, **of}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arch = read_architecture(str(tmp_path))
    assert tuple(layer.attention.window for layer in arch.layers) == windows
    with pytest.raises(ConfigError, match="model's 9000 positions"):
        arch.context(9001)
    config |= {"use_sliding_window": True, "layer_types": ["full_attention"] * 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if "layer_types" in of:
        with pytest.raises(CheckpointError, match="layer_types: names 2 layers, not 3"):
            read_architecture(str(tmp_path))


def test_heads_of_a_qwen3_have_128_features(tmp_path: Path) -> None:
    config = LLAMA_SIZES | {"model_type": "qwen3", "head_dim": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_architecture(str(tmp_path)).head_size == 128


def test_old_files_also_hold_what_is_computed(tmp_path: Path) -> None:
    save(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    write_hf_state(tmp_path, state | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    checkpoint = open_checkpoint(str(tmp_path))
    assert torch.equal(checkpoint.tensor("wte.weight"), state["model.embed_tokens.weight"])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_four_bits_are_taken_as_they_are_stored(kind: str, tmp_path: Path) -> None:
    """They are not rounded a second time, by tensor ranks neither."""
    arch = llama(width=64, heads=4, kv_heads=2, head_width=32, inner_width=96, vocab_size=64)
    path = write_gguf(tmp_path / "model.gguf", arch, random_tensors(arch), kind, "llama")
    checkpoint = open_checkpoint(str(path))
    for name, shape in tensor_shapes(arch).items():
        if len(shape) < 2 or name == "wte.weight":
            continue
        rows = slice(0, 8), slice(shape[0] - 24, shape[0])
        found = checkpoint.four_bits(name, rows)
        if kind == "Q8_0":
            assert found is None
            return
        assert found is not None
        numbers, scales, minima = found
        weights = numbers * scales.float()[:, :, None] + minima.float()[:, :, None]
        assert torch.equal(weights.flatten(1), checkpoint.tensor(name, TensorPart(rows))), name
    exact, four = (
        Pipeline(checkpoint, "2", backend=CpuBackend("float32", quantization=of), num_sequences=1)
        for of in ("none", "int4")
    )
    ids = prompt(30, vocab_size=64)
    theirs, ours = (pipeline.logits(pipeline.hidden(ids, 30)) for pipeline in (exact, four))
    # What is left is the rounding of rows to int8, and of the LM head.
    error = (ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt()
    assert error < 0.05


def test_factors_of_frequencies_are_applied_or_refused(tmp_path: Path) -> None:
    arch = llama(width=64, heads=4, kv_heads=2, head_width=32, inner_width=96, vocab_size=64)

    def frequencies(factors: torch.Tensor) -> tuple[float, ...]:
        tensors = random_tensors(arch) | {"rope_freqs.weight": factors}
        rotary = read_architecture(str(write_gguf(tmp_path / "m.gguf", arch, tensors, model="llama"))).rotaries[0]
        return rotary.frequencies

    assert frequencies(torch.full((16,), 4.0)) == tuple(number / 4 for number in arch.rotaries[0].frequencies)
    shapes = [torch.ones(shape) for shape in ((7,), (1, 16), (32,))]
    for wrong in [*shapes, *(torch.full((16,), value) for value in (0.0, -1.0, torch.nan, torch.inf))]:
        with pytest.raises(CheckpointError, match=r"rope_freqs.weight: is not 16 numbers from 1e-6 to 1e12"):
            frequencies(wrong)


def test_a_gguf_that_is_cut_short_or_a_part_or_none(tmp_path: Path) -> None:
    arch = llama(width=64, heads=4, kv_heads=2, head_width=32, inner_width=96, vocab_size=64)
    path = write_gguf(tmp_path / "model.gguf", arch, random_tensors(arch), "Q8_0", "llama")
    content, theta = path.read_bytes(), b"\x14" + bytes(7) + b"llama.rope.freq_base"
    kind = content.index(b"attn_q.weight") + 33
    for changed, problem in (
        (content[:-100], r"is the file whole\?"),
        (b"<html>" + content, "is a web page, as a failed download leaves it, not a GGUF file"),
        (
            content.replace(theta, b"\x0b" + bytes(7) + b"split.count"),
            "split.no: is 0 of 10000.0 parts, which cannot be",
        ),
        (content[: kind - 20] + bytes(4) + content[kind:], "attn_q.weight: has 0 dimensions, not 1 to 4"),
        (content[:kind] + b"\x10" + content[kind + 1 :], "attn_q.weight: has the type IQ2_XXS; served are F32"),
    ):
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=problem):
            open_checkpoint(str(path))
    a_value = struct.pack("<IQQQIIQ", 3, 0, 1, 0, 9, 0, 3 << 30)  # a list of 3 GB
    path.write_bytes(b"GGUF" + a_value)
    os.truncate(path, 4 << 30)
    with pytest.raises(CheckpointError, match="its header ends too early, or passes 64 MiB, after byte"):
        open_checkpoint(str(path))
