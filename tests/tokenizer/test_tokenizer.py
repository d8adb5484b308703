"""Encoding is tiktoken's, raises nothing but ValueError, and round-trips all text."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tiktoken_ext.openai_public import r50k_pat_str
from tokenizers import Tokenizer as HuggingFaceTokenizer

from ppserve.tokenizer import Tokenizer, load_tokenizer
from tests.tokenizer.conftest import VOCABULARIES
from tools import make_random_gpt2 as maker

TINY = load_tokenizer("tiny")
assert TINY is not None
RANKS = maker.read_ranks(VOCABULARIES["tiny"])
ORACLE = tiktoken.Encoding("oracle", pat_str=r50k_pat_str, mergeable_ranks=RANKS, special_tokens={})


@given(st.one_of(st.text(), st.text("aest '\n0é", max_size=80)))
def test_text_round_trips(text: str) -> None:
    ids = TINY.encode(text)
    assert ids == ORACLE.encode_ordinary(text)
    assert TINY.decode(ids) == text


@given(st.lists(st.integers(-(2**70), 2**70)))
def test_any_ids_decode(ids: list[int]) -> None:
    assert TINY.decode(ids) == b"".join(map(TINY.text_bytes, ids)).decode(errors="replace")


def test_end_of_text_as_an_id_has_bytes_but_no_text(tiny: Tokenizer) -> None:
    assert tiny.special_ids["<|endoftext|>"] == tiny.vocab_size - 1
    assert tiny.token_bytes(tiny.special_ids["<|endoftext|>"]) == b"<|endoftext|>"
    assert tiny.decode([tiny.special_ids["<|endoftext|>"]]) == ""


def test_ids_beyond_the_vocabulary_have_no_bytes(tiny: Tokenizer) -> None:
    assert [tiny.token_bytes(i) for i in (-1, tiny.vocab_size, 2**40)] == [b"", b"", b""]


def test_half_a_surrogate_pair_is_no_text(tiny: Tokenizer) -> None:
    with pytest.raises(ValueError, match="cannot be tokenized"):
        tiny.encode("a\ud800b")


def test_long_runs_are_encoded_in_reasonable_time(tiny: Tokenizer) -> None:
    for text in ("a" * 200_000, " " * 200_000, "\n \t" * 70_000, "é" * 100_000):
        assert tiny.decode(tiny.encode(text)) == text


def test_what_is_written_is_read_back(tiny: Tokenizer, tmp_path: Path) -> None:
    """Others read it back too: to them, the end of text is a special token."""
    (tmp_path / "tokenizer.json").write_bytes(tiny.to_json())
    read = load_tokenizer(str(tmp_path))
    assert (read.vocab_size, read.special_ids) == (tiny.vocab_size, tiny.special_ids)
    assert read.to_json() == tiny.to_json()
    for token_id in range(tiny.vocab_size):
        assert read.token_bytes(token_id) == tiny.token_bytes(token_id)
        assert read.text_bytes(token_id) == tiny.text_bytes(token_id)
    theirs = HuggingFaceTokenizer.from_str(tiny.to_json().decode())
    text = "Once upon a time, in Alder Bridge — there’s 1 lamp.\n"
    assert theirs.encode(text).ids == tiny.encode(text)
    assert theirs.encode("a<|endoftext|>").ids == [*tiny.encode("a"), tiny.special_ids["<|endoftext|>"]]
