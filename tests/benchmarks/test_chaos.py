"""The judges of `benchmarks/chaos`: what they must find, and what they must not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.chaos.record import Record, check
from benchmarks.chaos.soak import LIMIT_BYTES, growth


def memory_of(bytes_per_request: float, seed: int) -> list[tuple[int, float]]:
    """Return memory as an allocator shows it: in pages, with a buffer that comes and goes."""
    dice, found = random.Random(seed), []
    for served in range(1000, 3000, 25):
        buffer = dice.choice([0, 0, 65536])
        found.append((served, (60e6 + bytes_per_request * served + buffer) // 4096 * 4096))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_a_leak_of_a_kilobyte_is_found_and_none_is_seen_where_none_is(seed: int) -> None:
    leaking, flat = growth(memory_of(1024.0, seed)), growth(memory_of(0.0, seed))
    assert leaking is not None
    assert leaking.low > LIMIT_BYTES
    assert flat is not None
    assert flat.high < LIMIT_BYTES


def recorded(path: Path, second_answer: list[int], text: str = "", logprob: float = -1.0) -> Path:
    record = Record(path)
    for kind, ids in (("undisturbed", [1, 2, 3]), ("answer", second_answer)):
        record.note("begin", caller=0, kind=kind)
        for token in ids:
            mine = kind == "answer"
            seen = text[token - 1] if mine and text else "abcd"[token - 1]
            record.note("tokens", caller=0, tokens=[[token, logprob if mine else -1.0]], text=seen)
        record.note("end", caller=0, kind=kind)
    record.close()
    return path


@pytest.mark.parametrize(
    ("ids", "text", "logprob"),
    [
        *(([1, 2, 4], "", -1.0), ([1, 2], "", -1.0), ([1, 2, 2, 3], "", -1.0), ([1, 2, 3, 4], "", -1.0)),
        *(([1, 2, 3], "abd", -1.0), ([1, 2, 3], "", -1.5)),
    ],
)
def test_a_token_that_is_wrong_missing_or_there_twice_and_another_text_or_log_probability_are_found(
    ids: list[int], text: str, logprob: float, tmp_path: Path
) -> None:
    assert check(recorded(tmp_path / "wrong", ids, text, logprob)).wrong == 1
    assert check(recorded(tmp_path / "right", [1, 2, 3], text="abc")).is_clean
