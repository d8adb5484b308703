"""The running sequences, by what they can do next. Each is in at most one of these places:

filling   tokens of its prompt (or, after a loss, of its replay) are left to schedule
returned  its latest token has returned and can be scheduled
siblings  for n > 1: it waits until the leader, another sequence of its request, has scheduled their prompt
          up to its last token
(none)    all its known tokens are in flight
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView, ValuesView
from collections.abc import Sequence as Seq

from ppserve.core.scheduling.sequence import Sequence


class RunningSet:
    """Each place is kept in the order in which its sequences are scheduled."""

    def __init__(self) -> None:
        self._running: dict[int, Sequence] = {}
        self._filling: dict[int, Sequence] = {}
        self._returned: dict[int, Sequence] = {}
        self._siblings: dict[int, list[Sequence]] = {}

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
    def returned(self) -> ValuesView[Sequence]:
        """Oldest return first."""
        return self._returned.values()

    @property
    def num_decoding(self) -> int:
        """Sequences of which at most the latest known token is left to schedule."""
        waiting = sum(len(siblings) for siblings in self._siblings.values())
        return len(self._running) - len(self._filling) - waiting

    def admit(self, leader: Sequence, siblings: Seq[Sequence]) -> None:
        """The leader computes the prompt. Its siblings start at the prompt's last token."""
        self._running.update((s.id, s) for s in (leader, *siblings))
        self._filling[leader.id] = leader
        if siblings:
            self._siblings[leader.id] = list(siblings)
            self._wake_siblings(leader)

    def admit_again(self, sequences: Iterable[Sequence]) -> None:
        """Sequences that ran elsewhere compute from their first token; none waits for a leader."""
        for sequence in sequences:
            self._running[sequence.id] = self._filling[sequence.id] = sequence

    def token_returned(self, sequence: Sequence) -> None:
        self._returned[sequence.id] = sequence

    def slices_taken(self, sequences: Iterable[Sequence]) -> None:
        """A step takes slices of these. Siblings may use what it computes from the next step on."""
        for sequence in sequences:
            if sequence.remaining == 0:
                self._filling.pop(sequence.id, None)
                self._returned.pop(sequence.id, None)
            if sequence.id in self._siblings:
                self._wake_siblings(sequence)

    def _wake_siblings(self, leader: Sequence) -> None:
        fork = len(leader.request.prompt_ids) - 1
        if leader.scheduled >= fork:
            for sibling in self._siblings.pop(leader.id):
                sibling.follow_leader()
                self._returned[sibling.id] = sibling

    def remove(self, sequence: Sequence) -> None:
        """The sequence ended. A leader with waiting siblings ends only together with them."""
        del self._running[sequence.id]
        self._filling.pop(sequence.id, None)
        self._returned.pop(sequence.id, None)
        for leader_id, siblings in list(self._siblings.items()):
            siblings[:] = [s for s in siblings if s is not sequence]
            if not siblings:
                del self._siblings[leader_id]

    def restart(self) -> None:
        """All sequences compute from their first token, in order of admission; none waits for a leader."""
        self._returned.clear()
        self._siblings.clear()
        self._filling = dict(self._running)
