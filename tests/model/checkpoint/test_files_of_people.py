"""Files as people have them: keys that say nothing, parts of a model, and files that are something else."""

from __future__ import annotations

import gzip
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ppserve.errors import CheckpointError, ConfigError
from ppserve.model.checkpoint.opening import open_checkpoint, read_architecture
from ppserve.tokenizer import load_tokenizer
from tests.model.checkpoint.damage import refusal
from tests.model.checkpoint.parity import LLAMA_SIZES, hugging_face
from tests.model.checkpoint.test_checkpoint_formats import check
from tests.model.checkpoint.writers import architecture, random_tensors, write_gguf, write_hf
from tests.model.random_checkpoint import llama

# ---- config.json ----

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


# ---- GGUF ----

LLAMA = llama(width=64, heads=4, kv_heads=2, head_width=32, inner_width=96, vocab_size=64)


def with_values(directory: Path, **values: float | bool | str) -> Path:
    """A GGUF of LLAMA with further values, by their names without the architecture's; _ stands for a dot."""
    add = {int: "uint32", float: "float32", bool: "bool", str: "string"}

    def more(writer: gguf.GGUFWriter) -> None:
        for name, value in values.items():
            getattr(writer, f"add_{add[type(value)]}")(f"llama.{name.replace('__', '.')}", value)

    return write_gguf(directory / "m.gguf", LLAMA, random_tensors(LLAMA), model="llama", more=more)


@pytest.mark.parametrize(
    "values",
    [
        {"expert_count": 0, "expert_used_count": 0, "expert_shared_count": 0},
        {"attention__scale": 32**-0.5, "attention__causal": True, "attention__clamp_kqv": 0.0},
        {"attention__scale": 0.0, "attention__max_alibi_bias": 0.0, "attention__sliding_window": 0},
        {"logit_scale": 1.0, "residual_scale": 1.0, "embedding_scale": 0.0, "expert_weights_scale": 0.0},
        {"rope__scaling__type": "none", "rope__scaling__attn_factor": 1.0, "rope__scale_linear": 1.0},
        {"use_parallel_residual": False, "pooling_type": 0, "final_logit_softcapping": 0.0},
    ],
    ids=str,
)
def test_values_of_a_gguf_that_are_so_anyway(values: dict[str, Any], tmp_path: Path) -> None:
    assert read_architecture(str(with_values(tmp_path, **values))) == LLAMA


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"expert_count": 8}, "llama.expert_count: is 8; no model with it is served"),
        ({"attention__scale": 0.5}, "llama.attention.scale: is 0.5; only 0.176777"),
        ({"logit_scale": 0.5}, "llama.logit_scale: is 0.5; no model with it is served"),
        ({"attention__causal": False}, "llama.attention.causal: is False; only True is served"),
        ({"something": 3}, "llama.something: is 3: an unknown key, which may change what is computed$"),
    ],
    ids=str,
)
def test_values_of_a_gguf_that_are_refused(values: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=problem):
        read_architecture(str(with_values(tmp_path, **values)))


GPT2 = architecture(width=64, inner_width=256)


def in_parts(directory: Path, per_part: int = 9, small_first: bool = False) -> list[Path]:
    options = {"split_max_tensors": per_part, "small_first_shard": small_first}
    write_gguf(directory / "m.gguf", GPT2, random_tensors(GPT2), **options)
    return sorted(directory.glob("m-*.gguf"))


@pytest.mark.parametrize("small_first", [False, True])
def test_parts_of_a_gguf_are_one_model(small_first: bool, tmp_path: Path) -> None:
    """Any of them may be named, or their folder; the first has the tokenizer, and perhaps no tensor."""
    paths = in_parts(tmp_path, small_first=small_first)
    assert len(paths) == 5 + small_first
    for given in (tmp_path, *paths):
        checkpoint = open_checkpoint(str(given))
        check(checkpoint, GPT2, random_tensors(GPT2))
        assert checkpoint.path == paths[0]
        assert read_architecture(str(given)) == GPT2
    assert {tensor.path for tensor in checkpoint._tensors.values()} == set(paths[small_first:])


def test_parts_that_are_missing_or_of_another_model(tmp_path: Path) -> None:
    paths = in_parts(tmp_path / "one")
    others = in_parts(tmp_path / "four", per_part=12)
    third = paths[2].read_bytes()
    paths[2].unlink()
    for given in (tmp_path / "one", paths[0], paths[4]):
        error = refusal(given)
        assert error.path == str(paths[2])
        assert "is missing: " in str(error)
        assert "is one of 5 parts of a model" in str(error)
    for foreign, problem in (
        (paths[1].read_bytes(), "split.no: is not part 3 of the model of m-00001-of-00005.gguf"),
        (others[2].read_bytes(), "split.no: is not part 3 of the model of m-00001-of-00005.gguf"),
        (third[:100], "cannot be read as a GGUF file"),
        (b"", "is an empty file, not a GGUF file"),
    ):
        paths[2].write_bytes(foreign)
        assert problem in str(refusal(paths[0]))
        assert refusal(paths[0]).path == str(paths[2])
    paths[2].write_bytes(third)
    whole = paths[0].rename(paths[0].with_name("model.gguf"))
    assert "is part 1 of 5; the other parts are found only if its name ends with -00001-of-00005.gguf" in str(
        refusal(whole)
    )


def test_a_part_with_the_tensors_of_another(tmp_path: Path) -> None:
    """Its number is right, so that only its tensors tell."""
    first, second, *_ = in_parts(tmp_path)
    content = bytearray(first.read_bytes())
    at = content.index(b"split.no") + 12
    content[at : at + 2] = (1).to_bytes(2, "little")
    second.write_bytes(content)
    assert "given twice" in str(refusal(first))


def test_parts_that_have_fewer_tensors_than_they_say(tmp_path: Path) -> None:
    paths = in_parts(tmp_path)
    for path in paths:
        content = bytearray(path.read_bytes())
        content[content.index(b"split.tensors.count") + 23] += 1
        path.write_bytes(content)
    assert "split.tensors.count: is 41, but the 5 parts have 40 tensors" in str(refusal(tmp_path))


@pytest.mark.parametrize("version", [1, 2, 4])
def test_versions_of_gguf(version: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", GPT2, random_tensors(GPT2))
    content = bytearray(path.read_bytes())
    content[4] = version
    path.write_bytes(content)
    if version == 2:
        check(open_checkpoint(str(path)), GPT2, random_tensors(GPT2))
    else:
        assert f"its version is {version}; only 2 and 3 are served" in str(refusal(path))


def test_the_other_byte_order_says_so(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", GPT2, random_tensors(GPT2), endianess=gguf.GGUFEndian.BIG)
    assert "big endian" in str(refusal(path))
    with pytest.raises(CheckpointError, match="big endian"):
        load_tokenizer(str(path))


# ---- directories ----


def test_a_gguf_beside_a_config_is_opened(tmp_path: Path) -> None:
    """Folders of the hub are like that; weights of Hugging Face come first where there are some."""
    write_gguf(tmp_path / "m-F32.gguf", GPT2, random_tensors(GPT2))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    check(open_checkpoint(str(tmp_path)), GPT2, random_tensors(GPT2))
    assert read_architecture(str(tmp_path)) == GPT2
    write_gguf(tmp_path / "m-Q8_0.gguf", GPT2, random_tensors(GPT2), "Q8_0")
    assert "holds several models, name one: m-F32.gguf, m-Q8_0.gguf" in str(refusal(tmp_path))
    small = architecture()
    write_hf(tmp_path, small, random_tensors(small))
    check(open_checkpoint(str(tmp_path)), small, random_tensors(small))


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (
            ["adapter_config.json", "adapter_model.safetensors"],
            "adapters (LoRA): merge them into their base model",
        ),
        (["params.json", "consolidated.00.pth"], "a model in its makers' own format: take that of Hugging Face"),
        (["model.onnx"], "model.onnx: an ONNX model"),
        (["config.json", "onnx/model.onnx"], "onnx/model.onnx: an ONNX model"),
        (["config.json", "tf_model.h5"], "tf_model.h5: weights of TensorFlow"),
        (["config.json", "flax_model.msgpack"], "flax_model.msgpack: weights of Flax"),
        (["config.json", "weights.npz"], "weights.npz: arrays of NumPy, as of MLX"),
        (["pytorch_model.bin"], "pytorch_model.bin: weights without their config.json"),
        (
            ["config.json", "model-00001-of-00002.safetensors"],
            "model-00001-of-00002.safetensors: safetensors, but no model.safetensors and no index",
        ),
    ],
    ids=str,
)
def test_a_directory_says_what_it_holds_instead_of_a_model(names: list[str], problem: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"model_type": "gpt2"}')
    error = refusal(tmp_path)
    assert error.path == str(tmp_path)
    assert problem in str(error)


def test_an_index_that_names_a_file_which_is_not_there(tmp_path: Path) -> None:
    small = architecture()
    write_hf(tmp_path, small, random_tensors(small), parts=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    error = refusal(tmp_path)
    assert error.path == str(tmp_path / "model.safetensors.index.json")
    assert "names files that are missing: model-00002-of-00003.safetensors" in str(error)


# ---- files that are something else ----


class Whole(torch.nn.Module):
    """What people save whole."""


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/readme.txt", "hello")


WRITE: dict[str, Callable[[Path], Any]] = {
    "web page": lambda path: path.write_text("\n<!DOCTYPE html><html><body>Not found</body></html>"),
    "LFS": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5\n"),
    "empty": Path.touch,
    "zip": zipped,
    "safetensors": lambda path: path.write_bytes(struct.pack("<Q", 32) + b"{}".ljust(32)),
    "GGUF": lambda path: path.write_bytes(b"GGUF" + bytes(40)),
    "ONNX": lambda path: path.write_bytes(b"\x08\x08\x12\x07pytorch\x1a\x052.1.0" + bytes(2000)),
    "pickle": lambda path: path.write_bytes(pickle.dumps(["a"])),
    "whole model": lambda path: torch.save(Whole(), path),
    "JSON": lambda path: path.write_text('{"error": "Entry not found"}'),
    "packed": lambda path: path.write_bytes(gzip.compress(bytes(5000))),
    "HDF5": lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(2000)),
    "GGML": lambda path: path.write_bytes(b"tjgg" + bytes(2000)),
    "text": lambda path: path.write_text("copyright of nobody" * 100),
    "bytes": lambda path: path.write_bytes(bytes(range(3, 200)) * 10),
}


SAYS = {
    "web page": "is a web page, as a failed download leaves it, not a",
    "LFS": "only says where Git LFS keeps the file",
    "empty": "is empty",
    "zip": "is a zip archive, not a",
    "safetensors": "is a safetensors file, not a",
    "GGUF": "cannot be read as a GGUF file",
    "ONNX": "is an ONNX model, not a",
    "pickle": "is a pickle, not a",
    "whole model": "is a zip archive, not a",
    "JSON": "is a text of JSON, not a",
    "packed": "is a packed archive: unpack it, not a",
    "HDF5": "is an HDF5 file, as of TensorFlow or Keras, not a",
    "GGML": "is a model of llama.cpp from before GGUF: convert it, not a",
    "text": "; it begins with 'copyrigh'",
    "bytes": "; it begins with 03 04 05 06 07 08 09 0a",
}
TORCH = "pytorch_model.bin", "model.bin", "ckpt.pt"
OWN = {
    **{("whole model", name): "Whole, code that would run; only tensors are read" for name in TORCH},
    **{("zip", name): "cannot be read as a file of torch.save" for name in TORCH},
    **{("pickle", name): "cannot be read as a file of torch.save (Unsupported" for name in TORCH[::2]},
    ("safetensors", "model.safetensors"): "this tensor is missing",
    **{("GGUF", name): "is a GGUF file, not a" for name in ("pytorch_model.bin", "model.safetensors")},
    **{("empty", name): "is an empty file, not a" for name in ("pytorch_model.bin", "model.safetensors")},
}


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "m.gguf", "model.bin", "ckpt.pt"])
@pytest.mark.parametrize("kind", WRITE)
def test_a_foreign_file_says_what_it_is(kind: str, name: str, tmp_path: Path) -> None:
    small = architecture()
    write_hf(tmp_path, small, random_tensors(small))
    (tmp_path / "model.safetensors").unlink()
    path = tmp_path / name
    WRITE[kind](path)
    error = refusal(tmp_path if name in ("model.safetensors", "pytorch_model.bin") else path)
    assert error.path == str(path)
    assert OWN.get((kind, name), SAYS[kind]) in str(error)
    if kind in ("text", "bytes") and name in ("m.gguf", "model.bin"):
        assert "begin with 'GGUF'" in str(error) or "begin with c6 d7 34 01, GGUF's with 'GGUF'" in str(error)


def test_files_that_are_cut_short_say_so(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", GPT2, random_tensors(GPT2))
    content = path.read_bytes()
    for length, problem in (
        (10, "cannot be read as a GGUF file (its header ends too early, or passes 64 MiB, after byte 8)"),
        (200, "cannot be read as a GGUF file (its header ends too early, or passes 64 MiB, after byte"),
        (len(content) - 1000, "is the file whole?"),
    ):
        path.write_bytes(content[:length])
        assert problem in str(refusal(path))
    small = architecture()
    weights = write_hf(tmp_path / "hf", small, random_tensors(small)) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "cannot be read as a safetensors file" in str(refusal(tmp_path / "hf"))
