"""Which request may be the one that kills stages, and how that is found out."""

from __future__ import annotations

from collections.abc import Hashable, Set

SUSPICIOUS_LOSSES = 2
_CONVICTING_LOSSES_OF_ONE_RANK = 2
_CONVICTING_LOSSES = 4


class PoisonIsolation:
    """The requests, by id, that may kill stages: their numbers of losses, and the suspects.

    A loss does not show which request caused it, so everything in flight is computed again. A request that was
    in flight at two losses, with no token between them, becomes a suspect. Suspects run alone, one after the
    other, while other requests wait. A token clears a suspect. A suspect fails if, while it ran alone, the same
    rank failed twice in the same way, or ranks failed four times: at its fourth loss at the earliest.
    If no rank failed, as when a network is cut, no request is to blame.

    After an epoch in which no step returned, the next one begins with a probe, a step without a request. If it
    returns, the stages work, and restarts are counted anew. If a stage dies of it, no request is to blame.
    """

    def __init__(self) -> None:
        self.suspects: list[str] = []  # the first of them runs alone, the others wait
        self._losses: dict[str, int] = {}
        self._failures: list[Set[Hashable]] = []  # at each loss of the lone request: which ranks failed, and how

    @property
    def lone(self) -> str | None:
        """The only request that may run now; None = all may."""
        return self.suspects[0] if self.suspects else None

    def watches(self, request_id: str) -> bool:
        """Whether a request was in flight at a loss and is not cleared."""
        return request_id in self._losses

    def record_loss(self, in_flight: Set[str], failed: Set[Hashable]) -> str | None:
        """Ranks failed with these requests in flight. Returns the culprit, if it is certain.
        failed: each by its place in the pipeline and how it failed."""
        lone = self.lone
        if not failed:
            return None
        if lone is not None and lone in in_flight:
            self._failures.append(failed)
            times = max(sum(rank in each for each in self._failures) for rank in failed)
            if times < _CONVICTING_LOSSES_OF_ONE_RANK and len(self._failures) < _CONVICTING_LOSSES:
                return None
            self.clear(lone)
            return lone
        for request in sorted(in_flight):
            self._losses[request] = self._losses.get(request, 0) + 1
            if self._losses[request] >= SUSPICIOUS_LOSSES and request not in self.suspects:
                self.suspects.append(request)
        return None

    def clear(self, request_id: str) -> None:
        """The request gained a token since its last loss, or ended."""
        self._losses.pop(request_id, None)
        if request_id == self.lone:
            self._failures = []
        if request_id in self.suspects:
            self.suspects.remove(request_id)
