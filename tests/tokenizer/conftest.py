"""Vocabularies for the tests: the built-in one always, GPT-2's own where ../shared lies beside the checkout."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ppserve.tokenizer import Tokenizer, load_tokenizer
from tools import make_random_gpt2 as maker

ROOT = Path(__file__).parents[2]
VOCABULARIES = {
    "tiny": ROOT / "ppserve/assets/tiny/tokenizer.tiktoken",
    "gpt2": ROOT.parent / "shared/data/gpt2.tiktoken",
}


ALPHABETS = (
    *("abcdefghij", "ABC's 'll 'Ve'S'LL", "0123456789٠١٢½²Ⅷ", "äöüßéèñçøåÄÖ", "日本語漢字かなカナ"),
    *("한국어조선말", "русский язык", "العربية עברית", "हिन्दी தமிழ் ไทย", "🙂👩‍👩‍👧🇩🇪👍🏽❤️"),
    *("e\u0301o\u0308\u1112\u1161\u11ab\u212b", "{}[]()<>=+-*/%!?.,;:'\"`#$&|\\_", "\0\x01\x1b\x7f\x80\x9f"),
    *(" \t\n\r\u00a0\u2003\u200b\u3000\ufeff\u2028\v\f\x85", ["<|endoftext|>", "<|im_end|>", "\u2581"]),
    ["def f(x):\n    return x\n", "\n\n    "],
)


def random_texts(count: int) -> list[str]:
    """Languages, emoji, code, control characters, long runs, any characters, and bytes that are no text."""
    rng = random.Random(5)

    def text() -> str:
        match rng.randrange(10):
            case 0:
                return rng.choice("a !0\n日é") * rng.randrange(300)
            case 1:
                return rng.randbytes(rng.randrange(60)).decode(errors="replace")
            case 2:
                return "".join(map(chr, rng.sample(range(0xE000, 0x110000), 9) + rng.sample(range(0xD800), 9)))
        return "".join(rng.choice(rng.choice(ALPHABETS)) for _ in range(rng.randrange(80)))

    return [text() for _ in range(count)]


# GPT-2's has 50,000 tokens: seconds instead of milliseconds.
SLOW = {"gpt2": pytest.mark.slow}
AT_HAND = [pytest.param(name, marks=SLOW.get(name, ())) for name, path in VOCABULARIES.items() if path.exists()]


@pytest.fixture(scope="session", params=AT_HAND)
def vocabulary_file(request: pytest.FixtureRequest) -> Path:
    return VOCABULARIES[request.param]


@pytest.fixture(scope="session")
def ranks(vocabulary_file: Path) -> dict[bytes, int]:
    return maker.read_ranks(vocabulary_file)


@pytest.fixture(scope="session")
def hugging_face(ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with vocab.json, merges.txt and tokenizer.json."""
    directory = tmp_path_factory.mktemp("vocabulary")
    maker.write_hugging_face_vocabulary(ranks, directory)
    return directory


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    return load_tokenizer("tiny")
