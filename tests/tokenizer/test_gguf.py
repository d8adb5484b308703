"""The tokenizer in a GGUF: byte-level with each splitting into words, and sentencepiece's."""

from __future__ import annotations

import base64
from pathlib import Path

import gguf
import pytest
import tokenizers

from ppserve.errors import CheckpointError
from ppserve.tokenizer import Tokenizer, load_tokenizer
from ppserve.tokenizer.formats import PRE_TOKENIZERS
from tests.tokenizer.test_sources import TEXTS


def write(path: Path, model: str, tokens: list[str], types: list[int], **lists: object) -> Path:
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in lists.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level(pre: str, tiny: Tokenizer, tmp_path: Path) -> None:
    theirs = tokenizers.Tokenizer.from_str(tiny.to_json().decode())
    tokens = [theirs.id_to_token(i) for i in range(tiny.vocab_size)]
    merges = [" ".join(pair) for pair in __import__("json").loads(tiny.to_json())["model"]["merges"]]
    types = [1] * (len(tokens) - 1) + [3]
    path = write(tmp_path / "m.gguf", "gpt2", tokens, types, token_merges=merges, tokenizer_pre=pre)
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.special_ids == tiny.special_ids
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert pre != "gpt-2" or ids == tiny.encode(text)


def test_sentencepiece_falls_back_to_bytes(tmp_path: Path) -> None:
    words = ["\u2581", "a", "b", "ab", "\u2581ab"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    scores = [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -5.0]
    path = write(tmp_path / "sha256-of-it", "llama", tokens, types, token_scores=scores)
    tokenizer = load_tokenizer(str(path))
    ids = tokenizer.encode("ab ab\u00e9")
    assert [tokenizer.token_bytes(i) for i in ids] == [b" ab", b" ab", b"\xc3", b"\xa9"]


def test_a_token_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """Where one can be cut in two is tried everywhere."""
    path = write(tmp_path / "m.gguf", "llama", ["<unk>", "b" * 1025], [2, 1], token_scores=[0.0, 0.0])
    with pytest.raises(CheckpointError, match=r"tokenizer.ggml.tokens: Expected `str` of length <= 1024"):
        load_tokenizer(str(path))
    (tmp_path / "tokenizer.tiktoken").write_bytes(base64.b64encode(b"b" * 1025) + b" 0")
    with pytest.raises(CheckpointError, match="line 1: this token is empty, too long or occurs twice"):
        load_tokenizer(str(tmp_path))
