"""A sequence's table of transitions. The walks show its slices, draws and ends."""

from __future__ import annotations

import itertools

import pytest

from ppserve.core.request import Request, StopConditions
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.sequence import NEXT, InvalidTransition, Sequence, SequenceStatus


@pytest.mark.parametrize(("old", "new"), list(itertools.product(SequenceStatus, SequenceStatus)))
def test_only_the_moves_of_the_table_are_made(old: SequenceStatus, new: SequenceStatus) -> None:
    sequence = Sequence(0, Request("r", (1, 2, 3), StopConditions(4)), 0, SchedulerConfig(1))
    sequence.status = old
    if new in NEXT[old]:
        sequence.move_to(new)
        assert sequence.status is new
    else:
        with pytest.raises(InvalidTransition):
            sequence.move_to(new)
        assert sequence.status is old
