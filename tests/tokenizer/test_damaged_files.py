"""Damaged vocabulary files: each is read or refused in one line that names the file; nothing else happens."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from ppserve.errors import CheckpointError
from ppserve.files import MAX_JSON_BYTES
from ppserve.tokenizer import Tokenizer, load_tokenizer
from tests.tokenizer.conftest import VOCABULARIES
from tools import make_random_gpt2 as maker

NAMES = ("tokenizer.json", "vocab.json", "merges.txt", "gpt2_tokenizer.bin", "tokenizer.tiktoken")


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Small files of each format: 400 ranks."""
    directory = tmp_path_factory.mktemp("intact")
    ranks = {token: rank for token, rank in maker.read_ranks(VOCABULARIES["tiny"]).items() if rank < 400}
    maker.write_hugging_face_vocabulary(ranks, directory)
    maker.write_llmc_vocabulary(ranks, directory / "gpt2_tokenizer.bin")
    lines = VOCABULARIES["tiny"].read_text().splitlines(keepends=True)[:400]
    (directory / "tokenizer.tiktoken").write_text("".join(lines))
    return {name: (directory / name).read_bytes() for name in NAMES}


Outcome = Tokenizer | CheckpointError


def open_damaged(directory: Path, name: str, content: bytes, intact: dict[str, bytes]) -> Outcome:
    (directory / name).write_bytes(content)
    if name == "merges.txt":
        (directory / "vocab.json").write_bytes(intact["vocab.json"])
    try:
        tokenizer = load_tokenizer(str(directory))
    except CheckpointError as error:
        message = str(error)
        assert message.startswith(str(directory))
        assert "\n" not in message
        assert len(message) < len(str(directory)) + 400
        return error
    assert "time" in tokenizer.decode(tokenizer.encode(" time"))
    return tokenizer


@pytest.mark.parametrize("name", NAMES)
def test_flipped_bits(name: str, intact: dict[str, bytes], tmp_path: Path) -> None:
    rng, outcomes = random.Random(name), set()
    for _ in range(300):
        content = bytearray(intact[name])
        for _ in range(rng.choice((1, 8))):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        outcomes.add(type(open_damaged(tmp_path, name, bytes(content), intact)))
    assert CheckpointError in outcomes  # the fuzz reaches what it is to test


ODD_VALUES = (None, True, -1, 0, 3, 2**70, 1.5, "", "a", "\ud800", "7" * 5000, [], ["a"], {}, {"a": 1}, [[[]]])


def replace_somewhere(document: Any, rng: random.Random) -> Any:
    """The document with an odd value in one place, or with one thing too few or twice."""
    if rng.random() < 0.3 or not isinstance(document, dict | list) or not document:
        return rng.choice(ODD_VALUES)
    place = rng.choice(list(document)) if isinstance(document, dict) else rng.randrange(len(document))
    changed = document.copy()
    if rng.random() < 0.15:
        del changed[place]
    elif isinstance(changed, dict) and rng.random() < 0.15:
        changed[rng.choice(("", "a", "<x>", "\ud800", "1" * 5000))] = changed.pop(place)
    else:
        changed[place] = replace_somewhere(changed[place], rng)
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "added_tokens.json", "tokenizer_config.json"])
def test_odd_values(name: str, intact: dict[str, bytes], tmp_path: Path) -> None:
    rng, outcomes = random.Random(name), set()
    documents = {
        "added_tokens.json": {"<pad>": 401, "<mask>": 402},
        "tokenizer_config.json": {
            "add_prefix_space": False,
            "added_tokens_decoder": {"400": {"content": "<|endoftext|>", "special": True}},
        },
    }
    document = documents[name] if name in documents else json.loads(intact[name])
    for beside in ("vocab.json", "merges.txt"):
        if name != "tokenizer.json":
            (tmp_path / beside).write_bytes(intact[beside])
    for _ in range(400):
        content = json.dumps(replace_somewhere(document, rng)).encode()
        outcomes.add(type(open_damaged(tmp_path, name, content, intact)))
    assert CheckpointError in outcomes


@pytest.mark.parametrize("name", NAMES)
def test_noise_and_nesting(name: str, intact: dict[str, bytes], tmp_path: Path) -> None:
    rng = random.Random(name)
    samples = [b"[" * 100_000, b'{"model":' * 20_000, b"[]", b"null", b"1" * 10_000, b'{"a": 1e999}']
    for content in (*samples, *(rng.randbytes(rng.randrange(4000)) for _ in range(50))):
        assert isinstance(open_damaged(tmp_path, name, content, intact), CheckpointError)


@pytest.mark.parametrize(
    ("header", "field"),
    [
        ((20240327, 2, 401, 400), "begin with c8 d7 34 01); it begins with c7 d7 34 01"),
        ((20240328, 3, 401, 400), "version"),
        ((20240328, 2, 402, 400), "token 401"),
        ((20240328, 2, 400, 400), "14 bytes follow"),
    ],
)
def test_header_of_llmcs_tokenizer(
    header: tuple[int, ...], field: str, intact: dict[str, bytes], tmp_path: Path
) -> None:
    content = struct.pack("<4I", *header) + intact["gpt2_tokenizer.bin"][16:]
    error = open_damaged(tmp_path, "gpt2_tokenizer.bin", content, intact)
    assert isinstance(error, CheckpointError)
    assert field in str(error)


def test_a_huge_file_is_not_read_into_memory(tmp_path: Path) -> None:
    with (tmp_path / "vocab.json").open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(CheckpointError, match="larger than 256 MiB"):
        load_tokenizer(str(tmp_path))
