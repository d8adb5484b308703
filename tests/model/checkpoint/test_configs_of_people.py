"""config.json as people have it: keys that say nothing, keys that are refused, and what the others mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ppserve.errors import CheckpointError, ConfigError
from ppserve.model.checkpoint.opening import read_architecture
from tests.model.checkpoint.parity import LLAMA_SIZES, hugging_face
from tests.model.checkpoint.writers import random_tensors, write_gguf
from tests.model.random_checkpoint import llama

SAYS_NOTHING: dict[str, Any] = {
    "unsloth_fixed": True,
    "unsloth_version": "2026.1.1",
    "auto_map": {"AutoModelForCausalLM": "modeling.Custom"},
    "attn_implementation": "flash_attention_2",
    "_attn_implementation": "sdpa",
    "_name_or_path": "org/base",
    "_flash_attn_2_enabled": True,
    "use_flash_attention": True,
    "model_max_length": 131072,
    "max_seq_length": 4096,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "num_logits_to_keep": 1,
    "transformers_version": "4.46.3",
    "torch_dtype": "bfloat16",
    "dtype": "float32",
    "use_cache": False,
    "pretraining_tp": 1,
    "id2label": {"0": "a"},
    "label2id": {"a": 0},
    "temperature": 0.6,
    "top_p": 0.9,
    "do_sample": True,
    "cache_implementation": "static",
    "assistant_confidence_threshold": 0.4,
    "attention_dropout": 0.1,
    "dropout": 0.1,
    "multiple_of": 256,
    "router_aux_loss_coef": 0.001,
    "output_router_logits": True,
    "neftune_noise_alpha": 5,
    "gradient_checkpointing": True,
    "is_decoder": True,
    "train_batch_size": 8,
    "tokenizer_class": "LlamaTokenizer",
}
IS_SO_ANYWAY: dict[str, Any] = {
    "rope_scaling": {"rope_type": "default"},
    "use_sliding_window": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "swish",
    "layer_types": ["full_attention"] * 3,
    "num_experts": 0,
    "num_local_experts": 0,
    "expert_count": 0,
    "partial_rotary_factor": 1.0,
    "residual_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": 0.0,
    "pruned_heads": {},
    "qk_layernorm": False,
    "sliding_window": 0,
}


def changed(directory: Path, **changes: Any) -> Path:
    """The directory with other keys in config.json; those that are given as ... taken out."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    return directory


def test_keys_that_say_nothing_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **LLAMA_SIZES}))
    before = read_architecture(str(tmp_path))
    for name, value in {**SAYS_NOTHING, **IS_SO_ANYWAY}.items():
        assert read_architecture(str(changed(tmp_path, **{name: value}))) == before


@pytest.mark.slow
def test_keys_that_say_nothing_change_nothing_in_transformers(tmp_path: Path) -> None:
    authored = hugging_face(tmp_path, model="Llama")
    changed(tmp_path, rope_parameters=..., **SAYS_NOTHING, **IS_SO_ANYWAY)
    theirs = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = (5, 6, 7, 8)
    with torch.inference_mode():
        assert torch.equal(theirs(torch.tensor([ids])).logits[0], authored.logits(ids))


@pytest.mark.parametrize(
    "config",
    [
        *("PreTrainedConfig", "GPT2Config", "LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config"),
        "GenerationConfig",
    ],
)
def test_what_transformers_writes_by_itself_is_no_reason_to_refuse(config: str, tmp_path: Path) -> None:
    """Each default value of its configurations, in a file of each family."""
    read = {"architectures", "eos_token_id", "max_position_embeddings", "model_type", "vocab_size", "hidden_act"}
    made = getattr(transformers, config)()
    keys = {name: value for name, value in made.to_dict().items() if name not in read}
    for family in ("gpt2", "llama") if config in ("PreTrainedConfig", "GenerationConfig") else (made.model_type,):
        sizes = {"model_type": family, **({} if family == "gpt2" else LLAMA_SIZES)}
        (tmp_path / "config.json").write_text(json.dumps({**keys, **sizes}))
        assert read_architecture(str(tmp_path)).family == ("gpt2" if family == "gpt2" else "llama")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4}},
            "the weights are quantized by awq; served are",
        ),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "by bitsandbytes; served",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "by gptq; served are float32, bfloat16 and float16"),
        ({"quantization_config": {"quant_method": "fp8"}}, "by fp8; served"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "by compressed-tensors; served"),
        ({"quantization_config": {"bits": 4}}, "the weights are quantized; served"),
        ({"compression_config": {"format": "pack-quantized"}}, "by pack-quantized; served"),
        (
            {"my_note": 3, "quantization_config": {"bits": 4}, "quantization": {"bits": 4}},
            "by MLX; served are .*and a GGUF's",
        ),
        ({"num_local_experts": 8}, "num_local_experts: is 8; no model with it is served"),
        ({"attn_logit_softcapping": 50.0}, "is 50.0; no model with it is served"),
        ({"logit_scale": 0.0625}, "is 0.0625; no model with it is served"),
        ({"partial_rotary_factor": 0.5}, "is 0.5; only 1 is served"),
        ({"partial_rotary_factor": 0}, "is 0; only 1 is served"),
        ({"residual_multiplier": 0.22}, "is 0.22; only 1 is served"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "no model with it is served"),
        ({"vision_config": {"depth": 2}}, "no model with it is served"),
        ({"my_note": "hi"}, "my_note: is hi: an unknown key, which may change .*; take it out if it does not"),
    ],
    ids=str,
)
def test_what_is_refused_has_advice_that_is_right(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **LLAMA_SIZES} | changes))
    with pytest.raises(CheckpointError, match=problem) as caught:
        read_architecture(str(tmp_path))
    assert ("take it out" in str(caught.value)) == (list(changes) == ["my_note"])


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default", "partial_rotary_factor": 1.0},
        {"rope_type": "linear", "factor": 1.0},
        {"rope_type": "dynamic", "factor": 2.0},
        YARN | {"truncate": True, "finetuned": True},
        YARN | {"truncate": False},
        YARN | {"mscale": 1.0},
        YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
        YARN | {"mscale": 0, "mscale_all_dim": 0.7},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.0, "attention_factor": 1.25},
    ],
    ids=str,
)
def test_parameters_of_rotary_positions_mean_what_they_do_in_transformers(
    scaling: dict[str, Any], tmp_path: Path
) -> None:
    config = transformers.LlamaConfig(**LLAMA_SIZES, rope_parameters={"rope_theta": 5000.0, **scaling})
    config.save_pretrained(tmp_path)
    rotary = read_architecture(str(tmp_path)).rotaries[0]
    if (kind := scaling["rope_type"]) == "default":
        theirs, magnitude = 5000.0 ** -(torch.arange(0, 8, 2) / 8), 1.0
    else:
        theirs, magnitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    np.testing.assert_allclose(rotary.frequencies, theirs.numpy(), rtol=1e-6)
    assert rotary.magnitude == pytest.approx(magnitude)


@pytest.mark.parametrize(
    ("of", "context"),
    [
        ({"max_position_embeddings": 1 << 20}, 1 << 20),
        ({"max_position_embeddings": 10_485_760}, 1 << 20),
        ({"max_position_embeddings": None}, 2048),
        ({"max_position_embeddings": ..., "model_type": "mistral"}, 131072),
        ({"max_position_embeddings": ..., "model_type": "mistral", "sliding_window": None}, 131072),
        ({"max_position_embeddings": ..., "model_type": "qwen2"}, 32768),
        ({"max_position_embeddings": ..., "model_type": "qwen3"}, 32768),
    ],
    ids=str,
)
def test_positions_beyond_the_limit_or_unsaid(of: dict[str, Any], context: int, tmp_path: Path) -> None:
    """Where nothing is said, transformers' defaults hold; what is beyond, --max-model-len settles."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **LLAMA_SIZES}))
    arch = read_architecture(str(changed(tmp_path, **of)))
    assert arch.context(None) == context
    if of["max_position_embeddings"] in (None, ...):
        kind = of.get("model_type", "llama").capitalize()
        assert getattr(transformers, f"{kind}Config")().max_position_embeddings == context
    assert arch.context(1000) == 1000
    with pytest.raises(ConfigError, match=f"--max-model-len: .* is beyond the .*{context} positions"):
        arch.context(context + 1)


def test_a_gguf_with_more_positions_than_are_served(tmp_path: Path) -> None:
    arch = llama(width=64, heads=4, head_width=16, inner_width=96, vocab_size=64, max_positions=10_485_760)
    path = write_gguf(tmp_path / "m.gguf", arch, random_tensors(arch), model="llama")
    assert read_architecture(str(path)).max_positions == 1 << 20
