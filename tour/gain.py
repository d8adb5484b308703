"""How much faster a pipeline is than one stage, by the number of callers, and that in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_WINS = 1.1
"""The least ratio at which one is called faster than the other."""


@dataclass(frozen=True, slots=True)
class Gain:
    """The tokens per second of this many callers together, from one stage and from all stages."""

    callers: int
    of_one: float
    of_all: float

    @property
    def ratio(self) -> float:
        return self.of_all / self.of_one


def lesson(gains: Sequence[Gain], num_stages: int) -> str:
    """Return, in words, what the figures show. Whatever the figures are, it claims nothing else."""
    alone, best = gains[0], max(gains, key=lambda gain: gain.ratio)
    if best.ratio < _WINS:
        return (
            f"{num_stages} stages were nowhere faster than one ({best.ratio:.2f} times at best): here they share"
            " cores or memory that one of them can use up."
        )
    who = "one caller gets" if best is alone else f"{best.callers} callers get"
    wins = f"{who} {best.ratio:.1f} times as many tokens from {num_stages} stages as from one"
    if best is alone:
        return f"{wins}."
    if alone.ratio >= _WINS:
        return f"{wins}, and one caller gets {alone.ratio:.1f} times as many."
    return (
        f"{wins}, and one caller gets no more. A step of many sequences takes longer on one device, so a pipeline"
        " that divides its layers wins; a single sequence is in one stage at a time."
    )
