"""What is asked follows from seed and number alone, and fits the model."""

from __future__ import annotations

import random
import statistics
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppserve.bench.workload import (
    TraceRow,
    Workload,
    clip,
    drawn_sizes,
    parse_lengths,
    poisson_arrivals,
    read_trace,
    recorded_sizes,
)
from ppserve.errors import ConfigError

SIZES = drawn_sizes(parse_lengths("uniform:4:40"), parse_lengths("lognormal:8:0.5"))


def test_lengths_are_what_they_say() -> None:
    rng = random.Random(0)
    assert [parse_lengths("128")(rng) for _ in range(3)] == [128] * 3
    uniform = [parse_lengths("uniform:2:5")(rng) for _ in range(200)]
    assert set(uniform) == {2, 3, 4, 5}
    drawn = [parse_lengths("lognormal:100:0.5")(rng) for _ in range(2000)]
    assert statistics.median(drawn) == pytest.approx(100, rel=0.1)
    assert min(parse_lengths("lognormal:1:3")(rng) for _ in range(500)) == 1


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "-3", "1.5", "uniform:5", "uniform:9:3", "lognormal:0:1", "lognormal:9:nan", "normal:1:2", "a"),
        *("lognormal:1e308:1", "lognormal:9:50"),
    ],
)
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_lengths(text)


def test_a_question_depends_on_seed_and_number_alone() -> None:
    workload = Workload(SIZES, vocab_size=50, max_context=64, seed=3)
    forwards = [workload.question(number) for number in range(-5, 20)]
    backwards = [Workload(SIZES, 50, 64, 3).question(number) for number in reversed(range(-5, 20))]
    assert forwards == backwards[::-1]
    assert len({question.prompt_ids for question in forwards}) == 25
    other = [Workload(SIZES, 50, 64, 4).question(number) for number in range(-5, 20)]
    assert all(a.prompt_ids != b.prompt_ids for a, b in zip(forwards, other, strict=True))


def test_a_prefix_is_not_drawn_longer_than_the_context() -> None:
    """One of 200 million tokens took all memory, and then 64 of them."""
    long, fitting = (Workload(SIZES, 1000, 64, shared_prefix=length) for length in (10_000, 64))
    assert long._prefix(0) == fitting._prefix(0)
    assert len(long._prefix(0)) == 64


def test_prefixes_are_shared_and_nothing_else() -> None:
    sizes = drawn_sizes(parse_lengths("8"), parse_lengths("4"))
    one = [Workload(sizes, 1000, 64, shared_prefix=16).question(n).prompt_ids for n in range(20)]
    assert {len(prompt) for prompt in one} == {24}
    assert len({prompt[:16] for prompt in one}) == 1
    assert len({prompt[16:] for prompt in one}) == 20
    three = [Workload(sizes, 1000, 64, shared_prefix=16, num_prefixes=3).question(n).prompt_ids for n in range(50)]
    assert len({prompt[:16] for prompt in three}) == 3
    none = [Workload(sizes, 1000, 64).question(n).prompt_ids for n in range(20)]
    assert len({prompt[:4] for prompt in none}) == 20


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(2, 1024))
def test_clipped_lengths_fit_and_others_stay(prompt: int, new: int, context: int) -> None:
    clipped = clip(prompt, new, context)
    assert min(clipped) >= 1
    assert sum(clipped) <= context
    if prompt + new <= context:
        assert clipped == (prompt, new)


def test_what_was_clipped_is_said() -> None:
    rows = (TraceRow(0, 2000, 10), TraceRow(1, 20, 10))
    questions = [Workload(recorded_sizes(rows), 50, 64).question(number) for number in range(3)]
    assert [(len(q.prompt_ids), q.max_tokens) for q in questions] == [(54, 10), (20, 10), (54, 10)]
    assert [q.was_clipped for q in questions] == [True, False, True]
    assert all(0 <= token < 50 for token in questions[0].prompt_ids)


def test_arrivals_have_the_rate_and_the_burstiness() -> None:
    def gaps(burstiness: float) -> list[float]:
        return [b - a for a, b in pairwise(islice(poisson_arrivals(20.0, 1, burstiness), 4000))]

    for burstiness in (0.25, 1.0, 4.0):
        found = gaps(burstiness)
        assert statistics.fmean(found) == pytest.approx(1 / 20, rel=0.1)
        # The coefficient of variation of a gamma distribution is one over the root of its shape.
        assert statistics.stdev(found) * 20 == pytest.approx(burstiness**-0.5, rel=0.15)
    assert list(islice(poisson_arrivals(20.0, 1), 9)) == list(islice(poisson_arrivals(20.0, 1), 9))
    assert list(islice(poisson_arrivals(20.0, 1), 9)) != list(islice(poisson_arrivals(20.0, 2), 9))
    assert list(islice(poisson_arrivals(float("inf"), 1), 3)) == [0.0, 0.0, 0.0]


def test_a_trace_is_read_as_recorded(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.6805900,396,109\n2023-11-16 18:15:51,0,0\n"
    )
    rows = read_trace(file, time_scale=2.0)
    assert rows[:2] == (TraceRow(0.0, 374, 44), TraceRow(2.0, 396, 109))
    assert rows[2].prompt_tokens == rows[2].new_tokens == 1
    assert read_trace(file, 1) == rows[:1]


def test_a_trace_begins_with_its_earliest_request_wherever_that_stands(tmp_path: Path) -> None:
    """Before, such requests were due before the run, and their latency counted from then."""
    file = tmp_path / "trace.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,2\n2023-11-16 18:15:36,3,4\n")
    assert read_trace(file) == (TraceRow(0.0, 3, 4), TraceRow(10.0, 1, 2))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,x\n", ":2: GeneratedTokens: 'x'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,-5,1\n", ":2: ContextTokens: '-5'"),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,1\n", "no column GeneratedTokens"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,1\n2023-11-16 18:15:47+00:00,1,1\n",
            ":3: TIMESTAMP: some have a time zone",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "1" * 200_000, "cannot read"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,1\n2023-11-16 18:15:47,1\n",
            ":3: GeneratedTokens: None",
        ),
        ("", "no column"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "TIMESTAMP: 'yesterday' is not a time"),
    ],
)
def test_a_trace_that_is_none(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_trace(file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "nowhere")
