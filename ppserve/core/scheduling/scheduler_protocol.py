"""What the request queue needs of a replica."""

from __future__ import annotations

from typing import Protocol

from ppserve.core.scheduling.block_manager import BlockTable
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.sequence import Sequence, SequenceGroup


class RequestScheduler(Protocol):
    """A replica's scheduler, as the request queue needs it.

    may_admit: there may be room for a request. is_busy: steps are in flight. tokens_left: to compute for all its
    requests, at most.
    """

    @property
    def config(self) -> SchedulerConfig: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def may_admit(self) -> bool: ...

    @property
    def is_busy(self) -> bool: ...

    @property
    def tokens_left(self) -> int: ...

    def running(self, sequence_id: int) -> Sequence | None: ...

    def room_for(self, group: SequenceGroup) -> BlockTable | None:
        """The cached blocks that a request would begin with; None if there is no room for it."""

    def admit(self, group: SequenceGroup, known: BlockTable, now: float) -> None:
        """There is room. known: what `room_for` said."""

    def drop(self, sequence: Sequence) -> None:
        """A running sequence has ended."""
