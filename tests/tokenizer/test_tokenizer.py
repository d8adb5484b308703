"""Encoding and decoding never raise anything but ValueError, and round-trip all text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ppserve.tokenizer import Tokenizer, load_tokenizer

TINY = load_tokenizer("tiny")
assert TINY is not None


@given(st.text())
def test_text_round_trips(text: str) -> None:
    assert TINY.decode(TINY.encode(text)) == text


@given(st.lists(st.integers(-(2**70), 2**70)))
def test_any_ids_decode(ids: list[int]) -> None:
    assert TINY.decode(ids) == b"".join(map(TINY.text_bytes, ids)).decode(errors="replace")


def test_end_of_text_in_a_prompt_is_plain_text(tiny: Tokenizer) -> None:
    ids = tiny.encode("a<|endoftext|>b")
    assert tiny.eos_id not in ids
    assert tiny.decode(ids) == "a<|endoftext|>b"


def test_end_of_text_as_an_id_has_bytes_but_no_text(tiny: Tokenizer) -> None:
    assert tiny.eos_id == tiny.vocab_size - 1
    assert tiny.token_bytes(tiny.eos_id) == b"<|endoftext|>"
    assert tiny.decode([tiny.eos_id]) == ""


def test_ids_beyond_the_vocabulary_have_no_bytes(tiny: Tokenizer) -> None:
    assert [tiny.token_bytes(i) for i in (-1, tiny.vocab_size, 2**40)] == [b"", b"", b""]


def test_lone_surrogates_become_replacement_characters(tiny: Tokenizer) -> None:
    assert tiny.decode(tiny.encode("a\ud800b")) == "a\ufffdb"


def test_long_runs_are_encoded_in_reasonable_time(tiny: Tokenizer) -> None:
    for text in ("a" * 200_000, " " * 200_000, "\n \t" * 70_000, "é" * 100_000):
        assert tiny.decode(tiny.encode(text)) == text
