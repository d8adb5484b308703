"""What is shown while stages start."""

from __future__ import annotations

from ppserve.head.banner import _WORDS
from ppserve.head.members import StageState


def test_every_state_of_a_stage_has_a_word() -> None:
    assert set(_WORDS) == set(StageState)
