"""vocab.json and merges.txt without a tokenizer.json: what transformers' class of the tokenizer makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from ppserve.errors import CheckpointError
from ppserve.tokenizer import load_tokenizer
from tests.slow import quick_first
from tests.tokenizer.conftest import VOCABULARIES, random_texts
from tools import make_random_gpt2 as maker

MARKS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    maker.write_hugging_face_vocabulary(maker.read_ranks(VOCABULARIES["tiny"]), tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    return tmp_path


def write(directory: Path, model: dict[str, Any], tokenizer: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(model))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return directory


def added(*tokens: dict[str, Any]) -> dict[str, Any]:
    """Return fields that add these tokens behind the built-in model's."""
    size = len(maker.read_ranks(VOCABULARIES["tiny"])) + 1
    return {"added_tokens_decoder": {size + i: {**MARKS, **token} for i, token in enumerate(tokens)}}


TURN = {"content": "<|im_start|>", "special": True}
CASES = [
    ({"model_type": "gpt2"}, {}),
    ({"model_type": "gpt2"}, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}),
    ({"model_type": "gpt2"}, {"tokenizer_class": "GPT2TokenizerFast", "add_bos_token": True}),
    ({"model_type": "qwen2"}, {}),
    ({"model_type": "qwen2"}, {"tokenizer_class": "GPT2Tokenizer", **added(TURN)}),
    ({"model_type": "qwen3"}, {"tokenizer_class": "Qwen2Tokenizer", **added(TURN | {"rstrip": True})}),
    ({"model_type": "qwen3"}, {"tokenizer_class": "Qwen2TokenizerFast", "add_eos_token": True}),
    ({"model_type": "llama"}, {"tokenizer_class": "Qwen2Tokenizer", **added({"content": "boat", "lstrip": True})}),
]


@pytest.mark.parametrize("case", quick_first(CASES))
def test_a_text_is_split_as_its_class_does(case: tuple[dict[str, Any], dict[str, Any]], directory: Path) -> None:
    write(directory, *case)
    theirs, ours = AutoTokenizer.from_pretrained(directory), load_tokenizer(str(directory))
    for text in ("", "a  12345 boat ", "e\u0301's \u1112\u1161\u11ab", *random_texts(150)):
        if not any(name in text for name in ours.special_ids):
            assert ours.encode_parts([text], surrounds=True) == theirs(text).input_ids
    for name in ours.special_ids:
        parts = ["Once ", name, "\n  upon", name, ""]
        assert ours.encode_parts(parts) == theirs("".join(parts), add_special_tokens=False).input_ids


@pytest.mark.parametrize(
    ("model", "tokenizer", "found"),
    [
        ({"model_type": "llama"}, {}, "is missing"),
        ({"model_type": "mistral"}, {"tokenizer_class": "PreTrainedTokenizerFast"}, "is missing"),
        ({"model_type": "llama"}, {"tokenizer_class": "LlamaTokenizer"}, "is LlamaTokenizer"),
        ({"model_type": "gpt2"}, {"tokenizer_class": "BloomTokenizerFast"}, "is BloomTokenizer"),
        ({"model_type": "llama", "tokenizer_class": "CohereTokenizer"}, {}, "is CohereTokenizer"),
    ],
)
def test_a_class_with_a_splitting_of_its_own_is_refused(
    model: dict[str, Any], tokenizer: dict[str, Any], found: str, directory: Path
) -> None:
    """The refusal has its name; with a tokenizer.json beside, nothing needs to be known of it."""
    write(directory, model, tokenizer)
    says = rf"tokenizer_config\.json: tokenizer_class: {found}; without a tokenizer\.json, only GPT2Tok"
    with pytest.raises(CheckpointError, match=says):
        load_tokenizer(str(directory))
    maker.write_hugging_face_vocabulary(maker.read_ranks(VOCABULARIES["tiny"]), directory)
    assert load_tokenizer(str(directory)).encode("a")


def test_a_beginning_that_is_no_token_is_refused(directory: Path) -> None:
    write(directory, {"model_type": "gpt2"}, {"add_bos_token": True, "bos_token": "<s>"})
    with pytest.raises(
        CheckpointError, match=r"tokenizer_config\.json: adds <s> to every text, but that is no token"
    ):
        load_tokenizer(str(directory))


def test_beside_a_tokenizer_json_flags_of_older_days_are_not_read(directory: Path) -> None:
    """Its post-processor has the last word, as in transformers."""
    maker.write_hugging_face_vocabulary(maker.read_ranks(VOCABULARIES["tiny"]), directory)
    write(directory, {"model_type": "gpt2"}, {"add_bos_token": True, "add_eos_token": True})
    theirs = AutoTokenizer.from_pretrained(directory)
    assert load_tokenizer(str(directory)).encode_parts(["a boat"], surrounds=True) == theirs("a boat").input_ids
