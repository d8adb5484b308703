"""The tokenizer in a GGUF: byte-level with each splitting into words, and sentencepiece's."""

from __future__ import annotations

import base64
import json
import random
from itertools import pairwise
from pathlib import Path

import gguf
import pytest
import tokenizers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from ppserve.errors import CheckpointError
from ppserve.tokenizer import Detokenizer, Tokenizer, load_tokenizer
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


def split(digits: str) -> list[dict[str, object]]:
    pattern = {"Regex": PRETOKENIZE_REGEX.replace(r"\p{N}|", rf"\p{{N}}{digits}|")}
    return [{"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}]


PUBLISHED = {
    "gpt-2": [],
    "smollm": [{"type": "Digits", "individual_digits": True}],
    "llama-bpe": split("{1,3}"),
    "qwen2": split(""),
}
"""What precedes ByteLevel in the tokenizer.json of models with these names."""


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_is_that_of_a_tokenizer_json(pre: str, tiny: Tokenizer, tmp_path: Path) -> None:
    """Ids of many texts, and their pieces in a stream."""
    document = json.loads(tiny.to_json())
    tokens = sorted(document["model"]["vocab"], key=document["model"]["vocab"].__getitem__)
    merges = [" ".join(pair) for pair in document["model"]["merges"]]
    types = [1] * (len(tokens) - 1) + [3]
    path = write(tmp_path / "m.gguf", "gpt2", tokens, types, token_merges=merges, tokenizer_pre=pre)
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.special_ids == tiny.special_ids
    document["model"]["ignore_merges"] = pre == "llama-bpe"
    document["normalizer"] = {"type": "NFC"} if pre == "qwen2" else None
    last = document["pre_tokenizer"] | {"use_regex": pre in ("gpt-2", "smollm")}
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*PUBLISHED[pre], last]}
    theirs = tokenizers.Tokenizer.from_str(json.dumps(document))
    theirs.encode_special_tokens = True
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text).ids
        stream = Detokenizer(tokenizer)
        pieces = [*(stream.push(token_id).text for token_id in ids), stream.finish()]
        assert "".join(pieces) == (theirs.normalizer.normalize_str(text) if theirs.normalizer else text)


def merged_by_score(text: str, scores: dict[str, float]) -> list[bytes]:
    """The pieces of sentencepiece, found in the plainest way."""
    parts = list(text.replace(" ", "\u2581"))
    while True:
        pairs = enumerate(map("".join, pairwise(parts)))
        found = [(scores[pair], -at) for at, pair in pairs if pair in scores]
        if not found:
            break
        at = -max(found)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    known = ([part.replace("\u2581", " ").encode()] if part in scores else part.encode() for part in parts)
    return [piece if isinstance(piece, bytes) else bytes([piece]) for pieces in known for piece in pieces]


@pytest.mark.parametrize("prefix", [" ", ""])
def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(prefix: str, tmp_path: Path) -> None:
    rng = random.Random(5)
    words = ["\u2581", *"abcé\n"]
    while len(words) < 60:
        words += {rng.choice(words) + rng.choice(words)} - {*words}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words))]
    path = write(
        tmp_path / "sha256-of-it", "llama", tokens, types, token_scores=scores, add_space_prefix=bool(prefix)
    )
    tokenizer = load_tokenizer(str(path))
    for text in (*TEXTS, *("".join(rng.choices("abcé \n日", k=k)) for k in range(60))):
        ids, whole = tokenizer.encode(text), prefix + text if text else ""
        expected = merged_by_score(whole, dict(zip(words, scores[259:], strict=True)))
        assert [tokenizer.token_bytes(i) for i in ids] == expected
        stream = Detokenizer(tokenizer)
        pieces = [*(stream.push(token_id).text for token_id in ids), stream.finish()]
        assert "".join(pieces) == whole.replace("\u2581", " ")


def test_a_token_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """Where one can be cut in two is tried everywhere."""
    path = write(tmp_path / "m.gguf", "llama", ["<unk>", "b" * 1025], [2, 1], token_scores=[0.0, 0.0])
    with pytest.raises(CheckpointError, match=r"tokenizer.ggml.tokens: Expected `str` of length <= 1024"):
        load_tokenizer(str(path))
    (tmp_path / "tokenizer.tiktoken").write_bytes(base64.b64encode(b"b" * 1025) + b" 0")
    with pytest.raises(CheckpointError, match="line 1: this token is empty, too long or occurs twice"):
        load_tokenizer(str(tmp_path))
