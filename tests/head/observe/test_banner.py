"""What is shown while stages start."""

from __future__ import annotations

from ppserve.head.engine.members import StageState
from ppserve.head.observe.banner import _WORDS


def test_every_state_of_a_stage_has_a_word() -> None:
    assert set(_WORDS) == set(StageState)
