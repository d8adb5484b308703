"""What is asked follows from seed and number alone."""

from __future__ import annotations

import random
import statistics
from itertools import islice, pairwise

import pytest

from ppserve.bench.workload import Lengths, Workload, poisson_arrivals

SIZES = Lengths(4, 40), Lengths(8, 8)


def test_lengths_are_what_they_say() -> None:
    rng = random.Random(0)
    assert [Lengths.parse("128").draw(rng) for _ in range(3)] == [128] * 3
    assert {Lengths.parse("uniform:2:5").draw(rng) for _ in range(200)} == {2, 3, 4, 5}


@pytest.mark.parametrize("text", ["", "0", "-3", "1.5", "uniform:5", "uniform:9:3", "uniform:0:3", "normal:1:2"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not a length"):
        Lengths.parse(text)


def test_a_question_depends_on_seed_and_number_alone() -> None:
    workload = Workload(*SIZES, 50, 3)
    forwards = [workload.question(number) for number in range(-5, 20)]
    backwards = [Workload(*SIZES, 50, 3).question(number) for number in reversed(range(-5, 20))]
    assert forwards == backwards[::-1]
    assert len({question.prompt_ids for question in forwards}) == 25
    other = [Workload(*SIZES, 50, 4).question(number) for number in range(-5, 20)]
    assert all(a.prompt_ids != b.prompt_ids for a, b in zip(forwards, other, strict=True))
    assert all(4 <= len(question.prompt_ids) <= 40 and question.max_tokens == 8 for question in forwards)


def test_arrivals_are_a_poisson_process() -> None:
    gaps = [b - a for a, b in pairwise(islice(poisson_arrivals(20.0, 1), 4000))]
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.15)
    assert list(islice(poisson_arrivals(20.0, 1), 9)) == list(islice(poisson_arrivals(20.0, 1), 9))
    assert list(islice(poisson_arrivals(20.0, 1), 9)) != list(islice(poisson_arrivals(20.0, 2), 9))
    assert list(islice(poisson_arrivals(float("inf"), 1), 3)) == [0.0, 0.0, 0.0]
