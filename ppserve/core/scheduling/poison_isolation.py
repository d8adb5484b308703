"""How the request that kills stages is found."""

from __future__ import annotations

from collections.abc import Hashable, Set

SUSPICIOUS_LOSSES = 2
_CONVICTING_LOSSES_OF_ONE_RANK = 2
_CONVICTING_LOSSES = 4


class PoisonIsolation:
    """Finds the request that kills stages. Requests are known by their ids.

    A loss does not show which request caused it, so everything in flight is computed again. A request that was
    in flight at two losses, with no token between them, becomes a suspect. Suspects run alone, one after the
    other, while other requests wait. A token clears a suspect. A suspect fails if, while it ran alone, the same
    rank failed twice in the same way, or ranks failed four times: at its fourth loss at the earliest.
    If no rank failed, as when a network is cut, no request is blamed.

    After an epoch in which no step returned, the next one begins with a probe, a step without a request. If it
    returns, the stages work, and restarts are counted anew. If a stage dies of it, no request is blamed.
    """

    def __init__(self) -> None:
        self.suspects: list[str] = []  # the first of them runs alone, the others wait
        self._losses: dict[str, int] = {}
        # Each loss while the first suspect ran alone: which ranks, and how.
        self._failures: list[Set[Hashable]] = []

    @property
    def lone(self) -> str | None:
        """The only request that may run now; None = all may run."""
        return self.suspects[0] if self.suspects else None

    def watches(self, request_id: str) -> bool:
        """Return whether a request was in flight at a loss and has not been cleared since."""
        return request_id in self._losses

    def record_loss(self, in_flight: Set[str], failed: Set[Hashable]) -> str | None:
        """Note that ranks failed with these requests in flight. Return the culprit if it is certain, else None.
        failed: each rank's place in the pipeline, and how it failed."""
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
        """Clear a request: it has gained a token since its last loss, or has ended."""
        self._losses.pop(request_id, None)
        if request_id == self.lone:
            self._failures = []
        if request_id in self.suspects:
            self.suspects.remove(request_id)
