"""The verdicts of `benchmarks/verdicts.py`: what a measurement may claim."""

from __future__ import annotations

import math

import pytest

from benchmarks.verdicts import Verdicts


def said(value: float, error: float, bound: float, other: float = 1.0) -> str:
    verdicts = Verdicts()
    verdicts.at_least(value, error, bound, "so fast", other)
    # The mirror image has the same verdict.
    verdicts.at_most(-value, error, -bound, "so late", -other)
    code = verdicts.end()
    found = "fails" if len(verdicts.failed) == 2 else "unclear" if len(verdicts.unclear) == 2 else "holds"
    assert len(verdicts.failed) + len(verdicts.unclear) == (0 if found == "holds" else 2)
    assert code == {"holds": 0, "fails": 1, "unclear": 2}[found]
    return found


@pytest.mark.parametrize(
    ("value", "error", "verdict"),
    [
        (1.00, 0.01, "holds"),
        (0.97, 0.014, "holds"),  # on the bound, and fine enough to tell it from 1
        (0.96, 0.01, "unclear"),
        (0.94, 0.01, "fails"),
        # Twice the error is more than 0.03: no loss of 3% could be seen.
        (1.00, 0.05, "unclear"),
        (1.06, 0.05, "unclear"),
        (1.08, 0.05, "holds"),  # clear all the same
        (0.90, 0.05, "unclear"),
        (0.86, 0.05, "fails"),
    ],
)
def test_a_ratio_that_should_be_no_loss(value: float, error: float, verdict: str) -> None:
    assert said(value, error, 0.97) == verdict


@pytest.mark.parametrize(
    ("value", "error", "verdict"),
    [
        (1.16, 0.06, "holds"),
        (1.16, 0.08, "unclear"),
        (1.32, 0.08, "holds"),
        (1.10, 0.06, "unclear"),
        (1.02, 0.06, "fails"),
    ],
)
def test_a_gain_has_to_be_told_from_none(value: float, error: float, verdict: str) -> None:
    assert said(value, error, 1.15) == verdict


@pytest.mark.parametrize(
    ("off_by", "error", "verdict"), [(0.08, 0.04, "holds"), (0.08, 0.06, "unclear"), (0.2, 0.04, "fails")]
)
def test_a_difference_has_to_be_told_from_zero(off_by: float, error: float, verdict: str) -> None:
    verdicts = Verdicts()
    verdicts.at_most(off_by, error, 0.10, "off by", other=0.0)
    code = verdicts.end()
    assert code == {"holds": 0, "fails": 1, "unclear": 2}[verdict]


@pytest.mark.parametrize(
    ("value", "error"),
    [(math.nan, 0.01), (1.0, math.nan), (math.nan, math.nan), (1.2, math.inf), (math.inf, 0.01)],
)
def test_what_is_no_number_is_unclear(value: float, error: float) -> None:
    assert said(value, error, 0.97) == "unclear"
