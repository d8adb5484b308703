"""The running sequences, by what they can do next. Each is in at most one of these places:

filling   tokens of its prompt (or, after a loss, of its replay) are left to schedule
returned  its latest token has returned and can be scheduled; for n > 1, once its leader is far enough
(none)    all its known tokens are in flight
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView, ValuesView

from ppserve.core.scheduling.sequence import Sequence


class RunningSet:
    """Each place is kept in the order in which its sequences are scheduled."""

    def __init__(self) -> None:
        self._running: dict[int, Sequence] = {}
        self._filling: dict[int, Sequence] = {}
        self._returned: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._running)

    def get(self, sequence_id: int) -> Sequence | None:
        return self._running.get(sequence_id)

    @property
    def ids(self) -> KeysView[int]:
        return self._running.keys()

    @property
    def running(self) -> ValuesView[Sequence]:
        """All of them, in order of admission."""
        return self._running.values()

    @property
    def filling(self) -> ValuesView[Sequence]:
        """In order of admission."""
        return self._filling.values()

    @property
    def returned(self) -> list[Sequence]:
        """Oldest return first."""
        return [sequence for sequence in self._returned.values() if sequence.is_ready]

    @property
    def num_decoding(self) -> int:
        """Sequences of which at most the latest known token is left to schedule."""
        num_waiting = sum(not sequence.is_ready for sequence in self._returned.values())
        return len(self._running) - len(self._filling) - num_waiting

    def admit(self, sequence: Sequence) -> None:
        """A sequence that follows a leader has its prompt's last token left, any other one its prompt."""
        self._running[sequence.id] = sequence
        (self._filling if sequence.leader is None else self._returned)[sequence.id] = sequence

    def add_returned(self, sequence: Sequence) -> None:
        """Its latest token has returned."""
        self._returned[sequence.id] = sequence

    def remove_scheduled(self, sequences: Iterable[Sequence]) -> None:
        """A step takes slices of these."""
        for sequence in sequences:
            if sequence.remaining == 0:
                self._filling.pop(sequence.id, None)
                self._returned.pop(sequence.id, None)

    def remove(self, sequence: Sequence) -> None:
        """The sequence ended, or leaves the replica."""
        del self._running[sequence.id]
        self._filling.pop(sequence.id, None)
        self._returned.pop(sequence.id, None)

    def restart(self) -> None:
        """All sequences compute from their first token, in order of admission."""
        self._returned.clear()
        self._filling = dict(self._running)
