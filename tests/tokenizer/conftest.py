"""Vocabularies for the tests: the built-in one always, GPT-2's own where ../shared lies beside the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppserve.tokenizer import Tokenizer, load_tokenizer
from tools import make_random_gpt2 as maker

ROOT = Path(__file__).parents[2]
VOCABULARIES = {
    "tiny": ROOT / "ppserve/assets/tiny/tokenizer.tiktoken",
    "gpt2": ROOT.parent / "shared/data/gpt2.tiktoken",
}


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
