"""What `to_json` writes tokenizes as we do, in Hugging Face's hands and in ours."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceTokenizer

from ppserve.tokenizer import load_tokenizer

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


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(TINY.to_json())
    read = load_tokenizer(str(tmp_path))
    assert read is not None
    assert (read.vocab_size, read.eos_id) == (TINY.vocab_size, TINY.eos_id)
    assert read.to_json() == TINY.to_json()
    for token_id in range(TINY.vocab_size):
        assert read.token_bytes(token_id) == TINY.token_bytes(token_id)
        assert read.text_bytes(token_id) == TINY.text_bytes(token_id)
