"""Llamas and their kin in every format: what transformers computes with, and what llama.cpp's converter writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from ppserve.errors import CheckpointError
from ppserve.model.checkpoint import TensorPart
from ppserve.model.checkpoint.families import tensor_shapes
from ppserve.model.checkpoint.llama import FAMILY
from ppserve.model.checkpoint.opening import open_checkpoint, read_architecture
from ppserve.model.cpu.backend import CpuBackend
from tests.model.checkpoint.writers import write_hf_state
from tests.model.pipelines import Pipeline, prompt
from tests.model.random_checkpoint import RandomCheckpoint, llama

CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}


def save(directory: Path, model_type: str = "llama", **changes: Any) -> transformers.PreTrainedModel:
    """A random model as transformers saves it."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "attn_implementation": "eager",
    }
    name = CLASSES[model_type]
    config = getattr(transformers, f"{name}Config")(**sizes | changes)
    model: transformers.PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.save_pretrained(directory)
    return model


def logits_are_those_of(model: transformers.PreTrainedModel, place: Path) -> None:
    ids = prompt(60, vocab_size=97)
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0]
    pipeline = Pipeline(open_checkpoint(str(place)), "1,2", num_sequences=1)
    ours = pipeline.logits(pipeline.hidden(ids, 13))
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
    assert ours.std() > 0.5, "logits too close together to tell a wrong model from a right one"


@pytest.mark.parametrize("model_type", CLASSES)
def test_every_model_is_that_of_transformers(model_type: str, tmp_path: Path) -> None:
    window = {"sliding_window": None} if model_type == "mistral" else {}
    logits_are_those_of(save(tmp_path, model_type, **window), tmp_path)


@pytest.mark.parametrize("kind", SCALINGS)
def test_every_kind_of_positions_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    scaling = SCALINGS[kind] | {"rope_theta": 5000.0}
    logits_are_those_of(save(tmp_path, rope_parameters=scaling, tie_word_embeddings=True), tmp_path)


def test_keys_of_older_files_mean_the_same(tmp_path: Path) -> None:
    save(tmp_path, rope_parameters=SCALINGS["llama3"] | {"rope_theta": 5000.0})
    found = read_architecture(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    scaling = dict(SCALINGS["llama3"])
    config |= {"rope_theta": 5000.0, "rope_scaling": {"type": scaling.pop("rope_type"), **scaling}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_architecture(str(tmp_path)) == found


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"num_key_value_heads": 4}, "heads of keys and values do not divide"),
        ({"hidden_act": "sigmoid"}, "hidden_act"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"head_dim": 7}, "head_dim"),
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


def test_a_window_limits_the_context(tmp_path: Path) -> None:
    save(tmp_path, "mistral", sliding_window=40)
    assert read_architecture(str(tmp_path)).max_positions == 40
    save(tmp_path, "qwen2", sliding_window=40, use_sliding_window=False)
    assert read_architecture(str(tmp_path)).max_positions == 128


def test_several_tokens_may_end_a_text(tmp_path: Path) -> None:
    save(tmp_path, eos_token_id=[5, 9, 9999])
    assert read_architecture(str(tmp_path)).eos_ids == (5, 9)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_gguf_has_the_tensors_that_were_converted(architecture: str, kind: str, tmp_path: Path) -> None:
    """Llama's converter interleaves the halves of each head of queries and keys."""
    qwen = {"qwen2": {"qkv_biases": True}, "qwen3": {"qk_norms": True}}.get(architecture, {})
    arch = llama(width=64, heads=4, kv_heads=2, head_width=32, inner_width=96, vocab_size=64, **qwen)
    checkpoint = RandomCheckpoint(arch)
    path = write_gguf(tmp_path / "model.gguf", checkpoint, architecture, kind)
    found = open_checkpoint(str(path))
    assert found.architecture == arch
    assert read_architecture(str(path)) == arch
    for name, shape in tensor_shapes(arch).items():
        expected = checkpoint.tensor(name)
        if len(shape) == 2:
            raw = gguf.GGMLQuantizationType[kind]
            expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(expected.numpy(), raw), raw))
        assert torch.equal(found.tensor(name).float(), expected.float()), name


def write_gguf(path: Path, checkpoint: RandomCheckpoint, architecture: str, kind: str) -> Path:
    """As llama.cpp's converter writes it; matrices of `kind`."""
    arch = checkpoint.architecture
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(arch.num_layers)
    writer.add_embedding_length(arch.width)
    writer.add_context_length(arch.max_positions)
    writer.add_feed_forward_length(arch.inner_width)
    writer.add_head_count(arch.num_heads)
    writer.add_head_count_kv(arch.num_kv_heads)
    writer.add_key_length(arch.head_size)
    writer.add_value_length(arch.head_size)
    writer.add_layer_norm_rms_eps(arch.layer_norm_epsilon)
    writer.add_rope_dimension_count(arch.head_size)
    writer.add_rope_freq_base(10000.0)
    for name in tensor_shapes(arch):
        tensor = checkpoint.tensor(name)
        if architecture == "llama" and name.endswith(("attn.q.weight", "attn.k.weight")):
            tensor = tensor.view(-1, 2, arch.head_size // 2, arch.width).swapaxes(1, 2).reshape(tensor.shape)
        own, _, leaf = name.rpartition(".")
        layer, module = (own.split(".", 2)[1:] if own.startswith("h.") else ("", own))
        stored = f"{f'blk.{layer}.' if layer else ''}{FAMILY.names[module][1]}.{leaf}"
        if tensor.ndim == 1:
            writer.add_tensor(stored, tensor.numpy())
        else:
            raw = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(stored, gguf.quants.quantize(tensor.numpy(), raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_old_files_also_hold_what_is_computed(tmp_path: Path) -> None:
    model = save(tmp_path)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    write_hf_state(tmp_path, state)
    logits_are_those_of(model, tmp_path)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_four_bits_are_taken_as_they_are_stored(kind: str, tmp_path: Path) -> None:
    """Without rounding them a second time, also by tensor ranks."""
    arch = llama(width=64, heads=4, kv_heads=2, head_width=32, inner_width=96, vocab_size=64)
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "model.gguf", RandomCheckpoint(arch), "llama", kind)))
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
