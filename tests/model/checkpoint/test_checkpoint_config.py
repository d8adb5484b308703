"""Every field of config.json: read, ignored because harmless, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppserve.core.architecture import Architecture
from ppserve.errors import CheckpointError
from ppserve.model.checkpoint.config_json import read_config
from ppserve.model.checkpoint.gpt2 import FAMILY
from ppserve.model.checkpoint.opening import read_architecture
from ppserve.model.checkpoint.settings import ACTIVATIONS
from tests.architectures import gpt2 as gpt2_architecture
from tests.model.checkpoint.writers import architecture, hf_config, random_tensors, write_gguf

ARCH = architecture()
OWN = FAMILY.synonyms.values()

Read = Callable[..., Architecture]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Read the config of ARCH with some fields changed, or taken out (given as ...)."""

    def read(**changes: Any) -> Architecture:
        config = {name: value for name, value in (hf_config(ARCH) | changes).items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_config(tmp_path)

    return read


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"n_layer": 7}, {"num_layers": 7}),
        ({"n_embd": 68, "n_head": 17}, {"width": 68, "num_heads": 17, "inner_width": 272}),
        ({"n_positions": 2048}, {"max_positions": 2048}),
        ({"n_inner": 33}, {"inner_width": 33}),
        ({"n_inner": None}, {"inner_width": 80}),
        ({"vocab_size": 99}, {"vocab_size": 99, "padded_vocab_size": 99}),
        ({"layer_norm_epsilon": 1e-6}, {"layer_norm_epsilon": 1e-6}),
        ({"scale_attn_weights": False}, {"scale_attn_weights": False}),
        ({"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_by_inverse_layer_idx": True}),
        ({"reorder_and_upcast_attn": True}, {}),
        ({"tie_word_embeddings": False}, {"tied_embeddings": False}),
        ({"eos_token_id": 3, "bos_token_id": 4}, {"eos_ids": (3,)}),
        ({"eos_token_id": [5, 6, 9999]}, {"eos_ids": (5, 6)}),
        ({"eos_token_id": 50256}, {"eos_ids": ()}),
        (dict.fromkeys(OWN, ...) | dict(zip(FAMILY.synonyms, (20, 3, 4, 24), strict=True)), {}),
        ({"n_positions": ..., "n_ctx": 24}, {}),
        ({"n_ctx": 1024}, {}),
        ({"model_type": ...}, {}),
        ({"architectures": ["GPT2Model"]}, {}),
        ({"attn_pdrop": 0.5, "classifier_dropout": 0.1, "summary_anything": True, "torch_dtype": "bfloat16"}, {}),
        ({"_attn_implementation_autoset": True, "use_cache": False, "add_cross_attention": False}, {}),
        ({"position_embedding_type": "absolute", "never_heard": None, "nor_of_this": False}, {}),
        (
            {"vocab_size": 50304, "eos_token_id": 50256},
            {"vocab_size": 50257, "padded_vocab_size": 50304, "eos_ids": (50256,)},
        ),
        *[({"activation_function": name}, {"activation": meant}) for name, meant in ACTIVATIONS.items()],
    ],
    ids=str,
)
def test_fields_that_are_read_or_harmless(read: Read, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    assert read(**changes) == architecture(**expected)


def test_the_defaults_are_those_of_gpt2_small(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert read_config(tmp_path) == gpt2_architecture(12, 768, 12, 1024, 50257, 50257, 3072, eos_ids=(50256,))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_type", "gemma"),
        ("architectures", ["GPT2LMHeadCustomModel"]),
        ("add_cross_attention", True),
        ("pruned_heads", {"0": [1, 2]}),
        ("position_embedding_type", "rotary"),
        ("quantization_config", {"bits": 4}),
        ("n_layer", 0),
        ("n_layer", 10**4000),
        ("n_layer", "12"),
        ("n_head", 3),
        ("activation_function", "gelu_20"),
        ("layer_norm_epsilon", float("nan")),
        ("eos_token_id", "<eos>"),
        ("eos_token_id", []),
        ("hidden_size", 24),
        ("bad\nname\u2028", 1),
    ],
)
def test_fields_that_are_refused(read: Read, tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(**{name: value})
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "config.json"))
    assert "\n" not in message
    assert "\u2028" not in message
    if name.isidentifier():
        assert caught.value.field == name


@pytest.mark.parametrize(
    "text",
    [
        b'{"model_type": "\xff\xfe"}',
        "{",
        "[]",
        "{}",
        '{"a": ' * 100_000,
        "\ufeff{}",
        '{"model_type": "gpt2", "n_layer": ' + "1" * 6000 + "}",
    ],
    ids=range(7),
)
def test_files_that_are_no_config(tmp_path: Path, text: str | bytes) -> None:
    (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)


def test_generation_config_overrules_the_special_ids(read: Read, tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text('{"eos_token_id": [9, 10], "temperature": 0.7}')
    arch = read(eos_token_id=3)
    assert arch.eos_id == 9
    path.write_text('{"eos_token_id": "9"}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        read()


@pytest.mark.parametrize(
    ("named", "eos_ids"),
    [
        ({}, (3,)),
        ({"eot": 5, "eom": 3, "bos": 7, "fim_pad": 8, "unknown": 9}, (3, 5, 8)),
        ({2: "<|im_end|>", 9: "<|im_start|>"}, (3, 2)),
        ({3: "<|endoftext|>", 9: "<|eot_id|>", 4: "<|eom_id|>", "eot": 9}, (3, 9, 4)),
        ({5: "<end_of_turn>", 6: "_<EOT>", 7: "</s>", 8: "<|file_sep|>", 9: "<eos> "}, (3, 5, 6, 7, 8)),
        ({5: "<|end|>", 6: "<|return|>"}, (3, 5, 6)),
        ({5: "<|end|>", 6: "<|return|>", 7: "<|call|>"}, (3, 6, 7)),
        ({36: "<|im_end|>"}, (3,)),
    ],
    ids=str,
)
def test_ends_of_a_gguf_by_key_and_by_name(
    tmp_path: Path, named: dict[str | int, Any], eos_ids: tuple[int, ...]
) -> None:
    """llama.cpp has the same ends. Those that are no tokens, or only pad, are none."""
    arch = replace(ARCH, vocab_size=36, eos_ids=(3,))
    path = write_gguf(tmp_path / "model.gguf", arch, random_tensors(arch), named=named)
    assert read_architecture(str(path)).eos_ids == eos_ids


VOCAB = {f"t{i}": i for i in range(30)}


@pytest.mark.parametrize(
    ("files", "vocab_size"),
    [
        ({}, 37),
        ({"vocab.json": VOCAB}, 30),
        ({"vocab.json": VOCAB, "added_tokens.json": {"<pad>": 31}}, 32),
        ({"vocab.json": VOCAB, "tokenizer_config.json": {"added_tokens_decoder": {"30": {}, "7": {}}}}, 31),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"30": {}}}}, 37),
        ({"tokenizer.json": {"model": {"vocab": VOCAB}, "added_tokens": [{"id": 30, "content": "<e>"}]}}, 31),
        ({"tokenizer.json": {"model": {"vocab": VOCAB}}, "vocab.json": {"a": 35}}, 36),
        ({"vocab.json": {"a": 99}}, 37),
        ({"tokenizer.tiktoken": "".join(f"YQ== {i}\n" for i in range(30))}, 30),
    ],
    ids=str,
)
def test_where_the_vocabulary_ends(read: Read, tmp_path: Path, files: dict[str, Any], vocab_size: int) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    for eos_ids in ((), (33,), (35, 2), (2, 99)):  # it reaches to every end that is a row
        arch = read(eos_token_id=[*eos_ids] or None)
        real = tuple(end for end in eos_ids if end < 37)
        assert (arch.vocab_size, arch.padded_vocab_size) == (max([vocab_size, *(end + 1 for end in real)]), 37)
        assert arch.eos_ids == real


@pytest.mark.parametrize(
    ("files", "eos_ids"),
    [
        ({"vocab.json": VOCAB, "tokenizer_config.json": {"eos_token": "t7"}}, (3, 7)),
        ({"vocab.json": VOCAB, "tokenizer_config.json": {"eos_token": {"content": "t3"}}}, (3,)),
        ({"vocab.json": VOCAB, "tokenizer_config.json": {"eos_token": "none such"}}, (3,)),
        ({"vocab.json": VOCAB, "tokenizer_config.json": {"eos_token": None}}, (3,)),
        (
            {
                "tokenizer.json": {"model": {"vocab": VOCAB}, "added_tokens": [{"id": 30, "content": "<end>"}]},
                "tokenizer_config.json": {"eos_token": "<end>"},
            },
            (3, 30),
        ),
        ({"added_tokens.json": {"e": 31}, "tokenizer_config.json": {"eos_token": "e"}}, (3, 31)),
        ({"tokenizer_config.json": {"eos_token": "t7"}}, (3,)),
    ],
)  # fmt: skip
def test_the_tokenizer_s_end_of_a_text_is_one_too(
    read: Read, tmp_path: Path, files: dict[str, Any], eos_ids: tuple[int, ...]
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert read(eos_token_id=3).eos_ids == eos_ids


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"model": {"type": "Unigram", "vocab": [["a", -1.5]]}}'),
        ("tokenizer.json", '{"model": {"vocab": {"a": 1}}, "added_tokens": [3]}'),
        ("vocab.json", '{"a": "1"}'),
        ("added_tokens.json", '{"a": 1.5}'),
        ("tokenizer.tiktoken", "YQ== one\n"),
        ("tokenizer.tiktoken", ""),
    ],
)
def test_damaged_tokenizers_are_named(read: Read, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        read()
