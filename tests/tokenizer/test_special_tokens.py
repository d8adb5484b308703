"""Special and other added tokens are found where the library finds them, but never in what callers type."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import pytest
from tokenizers import AddedToken, models, pre_tokenizers, processors

from tests.tokenizer.made_up import KINDS, loaded, made_up, surrounded

FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
TEXTS = ("<|a|>", "<b>", "PAD", " x ", "\n|", "w\u0301w")
"""Tokens: some end in a letter, one is white space at its ends, one is not composed."""
AROUND = ("", "", "\n", " ", "a", "ab ", "\n\n b", "\u3000", "e\u0301 ", "<", "ba\t\n", "w")


@pytest.mark.slow
def test_tokens_with_any_flags_are_found_as_in_the_library(tmp_path: Path) -> None:
    """A template's parts have the ids of the text that they make; parts alone would not."""
    rng = random.Random(45)
    num_changed = 0
    for kind, _ in product(KINDS, range(12)):
        flags = [{flag: rng.random() < 0.4 for flag in FLAGS} for _ in TEXTS]
        added = [
            AddedToken(text, special=place < 4, **chosen)
            for place, (text, chosen) in enumerate(zip(TEXTS, flags, strict=True))
        ]
        library = made_up(kind, *added)
        tokenizer = loaded(library, tmp_path)
        for _ in range(60):
            parts = [
                rng.choice(TEXTS[:4]) if place % 2 else rng.choice(AROUND)
                for place in range(rng.choice((3, 5, 7)))
            ]
            ids = tokenizer.encode_parts(parts)
            assert ids == library.encode("".join(parts), add_special_tokens=False).ids, (kind, parts, flags)
            alone = [
                token_id
                for place, part in enumerate(parts)
                for token_id in ([tokenizer.special_ids[part]] if place % 2 else tokenizer.encode(part))
            ]
            num_changed += ids != alone
    assert num_changed > 500, "the flags change nothing: this shows nothing"


@pytest.mark.slow
def test_a_long_chat_whose_tokens_are_partly_text_is_encoded_in_time(tmp_path: Path) -> None:
    """Some are none to the library, because its normalizer changes them or what is in front of them. The limit of
    a test's time is far below what looking at all of them for each would take."""
    library = made_up("prepend", *(AddedToken(text, special=True, normalized=True) for text in ("<s>", "<e>")))
    parts = [part for _ in range(20_000) for part in ("x ", "<s>", "x", "<e>")] + [""]
    ids = loaded(library, tmp_path).encode_parts(parts)
    assert ids == library.encode("".join(parts), add_special_tokens=False).ids
    assert len(set(ids)) > 3


@pytest.mark.parametrize("kind", KINDS)
def test_what_spells_a_special_token_is_text(kind: str, tmp_path: Path) -> None:
    """Merges, or a word that is left whole, may not make that token either."""
    library = made_up(kind, AddedToken("</s>", special=True), AddedToken("<|end|>", special=True))
    tokenizer = loaded(library, tmp_path)
    special = {*tokenizer.special_ids.values()}
    rng = random.Random(3)
    for _ in range(300):
        text = "".join(rng.choices(("</s>", "<|end|>", "</", "s>", " ", "a", "\n"), k=rng.randrange(1, 9)))
        ids = tokenizer.encode(text)
        assert special.isdisjoint(ids)
        assert tokenizer.decode(ids) in (text, " " + text)
        # Between the server's own, too.
        parts = tokenizer.encode_parts(["", "</s>", text, "<|end|>", ""])
        assert [token_id for token_id in parts if token_id in special] == [
            tokenizer.special_ids["</s>"], tokenizer.special_ids["<|end|>"],
        ]  # fmt: skip


@pytest.mark.parametrize("leaves_words", [False, True])
def test_a_vocabulary_whose_merges_make_a_special_token(leaves_words: bool, tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, "en", "end", "ends", "!!"]
    merges = [("e", "n"), ("en", "d"), ("end", "s"), ("!", "!")]
    model = models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges, ignore_merges=leaves_words)
    library = made_up("bytes")
    library.model = model
    library.add_tokens([AddedToken(text, special=True) for text in ("ends", "!!", "!", "en", "<new>")])
    tokenizer = loaded(library, tmp_path)
    assert tokenizer.special_ids == {
        text: library.token_to_id(text) for text in ("ends", "!!", "!", "en", "<new>")
    }
    first = tokenizer.token_bytes
    assert [first(i) for i in tokenizer.encode("ends!!<new>")] == [
        b"end",
        b"s",
        b"!",
        b"!",
        *map(bytes, zip(b"<new>")),
    ]
    assert tokenizer.encode_parts(["end", "ends", "", "<new>", "ends"]) == [
        *(library.token_to_id(piece) for piece in ("end", "ends", "<new>", "end", "s"))
    ]


PROCESSORS = {
    "none": None,
    "bytes": processors.ByteLevel(),
    "bos": "<s> $A",
    "eos": "$A </s>",
    "both": "<s> $A </s>",
    "two": "<s> </s> $A",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processor", [*PROCESSORS, "sequence", "roberta", "bert"])
def test_a_text_is_surrounded_as_its_post_processor_says(kind: str, processor: str, tmp_path: Path) -> None:
    library = made_up(kind, AddedToken("<s>", special=True), AddedToken("</s>", special=True))
    ends = ("</s>", library.token_to_id("</s>")), ("<s>", library.token_to_id("<s>"))
    match processor:
        case "sequence":
            template = surrounded(library, "<s> $A", "<s>").post_processor
            library.post_processor = processors.Sequence([processors.ByteLevel(), template])
        case "roberta":
            library.post_processor = processors.RobertaProcessing(*ends)
        case "bert":
            library.post_processor = processors.BertProcessing(*ends)
        case _:
            given = PROCESSORS[processor]
            if isinstance(given, str):
                surrounded(library, given, "<s>", "</s>")
            elif given is not None:
                library.post_processor = given
    tokenizer = loaded(library, tmp_path)
    for text in ("", "a", "ab a\n", " <", "\u3042"):
        ids = library.encode(text).ids
        assert tokenizer.encode_parts([text], surrounds=True) == ids
        assert tokenizer.decode(ids) == tokenizer.decode(tokenizer.encode(text))
    # What a template has written is not written again.
    whole = ["", *(part for name in ("<s>", "</s>") for part in (name, ""))]
    once = tokenizer.encode_parts(["", "<s>", "a", "</s>", ""], surrounds=True)
    assert once == library.encode("<s>a</s>", add_special_tokens=processor == "two").ids
    assert tokenizer.encode_parts(whole, surrounds=True) == library.encode("<s></s>", add_special_tokens=False).ids
    # But a text that spells it has it before itself.
    ids = tokenizer.encode_parts(["<s>"], surrounds=True)
    assert ids == [*tokenizer.begin, *tokenizer.encode("<s>"), *tokenizer.end]


def test_what_surrounds_a_text_is_never_shown(tmp_path: Path) -> None:
    """It is not shown even if it is only a part of the vocabulary, which a caller could type."""
    library = surrounded(made_up("prepend"), "</s> $A", "</s>")
    tokenizer = loaded(library, tmp_path)
    assert (tokenizer.begin, tokenizer.text_bytes(tokenizer.begin[0])) == ([library.token_to_id("</s>")], b"")
    assert tokenizer.begin[0] not in tokenizer.encode("a </s>")
