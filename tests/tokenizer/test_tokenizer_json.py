"""What `to_json` writes tokenizes as we do, in Hugging Face's hands and in ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceTokenizer

from ppserve.tokenizer import Tokenizer, load_tokenizer
from ppserve.tokenizer.vocabulary import AddedToken, Vocabulary

TINY = load_tokenizer("tiny")
assert TINY is not None
WRITTEN = HuggingFaceTokenizer.from_str(TINY.to_json().decode())


@given(st.text().filter(lambda text: "<|endoftext|>" not in text))
def test_hugging_face_makes_the_same_tokens_of_it(text: str) -> None:
    ids = WRITTEN.encode(text).ids
    assert ids == TINY.encode(text)
    assert WRITTEN.decode(ids) == TINY.decode(ids)


def test_the_end_of_text_is_a_special_token_there() -> None:
    assert WRITTEN.encode("a<|endoftext|>").ids == [*TINY.encode("a"), TINY.eos_id]


@pytest.mark.parametrize("prefix_space", [False, True])
def test_every_property_of_a_vocabulary_survives(prefix_space: bool, tmp_path: Path) -> None:
    """Merges in another order than ids, added tokens that are text and that are not, a normal form."""
    singles = {bytes([byte]): 300 - byte for byte in range(256)}
    ids = {**singles, b"th": 5, b"the": 3, b"he": 4, "ü".encode(): 2, b" th": 1}
    added = (AddedToken("<pad>", 301, special=True), AddedToken("ppserve", 302))
    order = (b"he", b"th", b"the", "ü".encode(), b" th")
    made = Tokenizer(Vocabulary("here", ids, order, added, prefix_space, "NFC"))
    (tmp_path / "tokenizer.json").write_bytes(made.to_json())
    read = load_tokenizer(str(tmp_path))
    theirs = HuggingFaceTokenizer.from_str(made.to_json().decode())
    assert read is not None
    for text in ("the other one", " the", "u\u0308ber ppserve", "then he", ""):
        assert read.encode(text) == made.encode(text) == theirs.encode(text).ids
    assert read.decode([301, 302]) == "ppserve"


def test_the_check_can_fail() -> None:
    """The control: with one merge less, another result."""
    assert TINY is not None
    document = json.loads(TINY.to_json())
    ids = TINY.encode(" upon")
    assert len(ids) == 1
    merges = document["model"]["merges"]
    document["model"]["merges"] = [pair for pair in merges if "".join(pair) != "\u0120upon"]
    assert HuggingFaceTokenizer.from_str(json.dumps(document)).encode(" upon").ids != ids
