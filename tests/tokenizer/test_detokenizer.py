"""Streams of text: joined they are the one-shot decode, cut where a naive search would cut it."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from ppserve.tokenizer import Detokenizer, Tokenizer, load_tokenizer

TINY = load_tokenizer("tiny")
assert TINY is not None
ID_OF = {TINY.token_bytes(i): i for i in range(TINY.vocab_size) if TINY.text_bytes(i)}

any_id = st.one_of(st.integers(0, 1279), st.integers(-3, 1500), st.just(1279))
# Few letters, so that stop strings overlap; one of them of two bytes, so that tokens split it.
small_text = st.text("abé", max_size=24)
stop_strings = st.lists(st.text("abé", min_size=1, max_size=5), max_size=4).map(tuple)


def split_anyhow(text: str, rng: random.Random) -> list[int]:
    """Token ids that spell `text`, cut at random places, characters included."""
    content, ids = text.encode(), []
    while content:
        lengths = [n for n in range(1, min(8, len(content)) + 1) if content[:n] in ID_OF]
        length = rng.choice(lengths)
        ids.append(ID_OF[content[:length]])
        content = content[length:]
    return ids


def stream(detokenizer: Detokenizer, ids: list[int]) -> tuple[str, str | None]:
    """All text of a stream that is pushed to its end, and the stop string that ended it."""
    text, matched = "", None
    for token_id in ids:
        piece = detokenizer.push(token_id)
        text, matched = text + piece.text, matched or piece.matched
    return text + detokenizer.finish(), matched


def cut_naively(text: str, stop: tuple[str, ...], include_stop: bool) -> tuple[str, str | None]:
    """Tries every end of the text in turn, and at each the longest stop string first."""
    for end in range(1, len(text) + 1):
        for candidate in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(candidate):
                return text[: end if include_stop else end - len(candidate)], candidate
    return text, None


@given(st.lists(any_id, max_size=40))
def test_pieces_join_to_the_one_shot_decode(ids: list[int]) -> None:
    assert stream(Detokenizer(TINY), ids) == (TINY.decode(ids), None)


@given(st.text(max_size=20), st.randoms(use_true_random=False))
def test_no_piece_ever_shows_a_part_of_a_character(text: str, rng: random.Random) -> None:
    detokenizer, shown = Detokenizer(TINY), ""
    for token_id in split_anyhow(text, rng):
        shown += detokenizer.push(token_id).text
        assert text.startswith(shown)


@settings(max_examples=600)
@given(small_text, stop_strings, st.booleans(), st.randoms(use_true_random=False))
def test_stop_strings_cut_where_a_naive_search_cuts(
    text: str, stop: tuple[str, ...], include_stop: bool, rng: random.Random
) -> None:
    ids = split_anyhow(text, rng)
    assert stream(Detokenizer(TINY, stop, include_stop), ids) == cut_naively(text, stop, include_stop)


@settings(max_examples=300)
@given(small_text, stop_strings, st.randoms(use_true_random=False))
def test_text_is_held_back_no_longer_than_it_may_become_a_stop_string(
    text: str, stop: tuple[str, ...], rng: random.Random
) -> None:
    detokenizer, shown, pushed = Detokenizer(TINY, stop), "", b""
    for token_id in split_anyhow(text, rng):
        piece = detokenizer.push(token_id)
        if piece.matched is not None:
            return
        shown, pushed = shown + piece.text, pushed + TINY.token_bytes(token_id)
        known = pushed.decode(errors="ignore")
        beginnings = {s[:n] for s in stop for n in range(1, len(s))}
        held = max((len(b) for b in beginnings if known.endswith(b)), default=0)
        assert shown == known[: len(known) - held]


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens(tiny: Tokenizer) -> None:
    ids = [ID_OF[b"a"]] * 5
    assert stream(Detokenizer(tiny, ("aa",), min_tokens=2), ids) == ("aa", "aa")
    assert stream(Detokenizer(tiny, ("aa",), min_tokens=4), ids) == ("aaaaa", None)
