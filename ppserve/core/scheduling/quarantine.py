"""Finds the request that kills stages, without failing others.

The loss of a stage does not show which request caused it, so everything in flight is replayed. A request that was
in flight at two losses, and gained no token between them, becomes a suspect. Suspects are replayed alone, one
after the other, while all other requests wait. A suspect that gains a token is cleared. A suspect that was alone
in the pipeline at two losses is the culprit and fails. So a request fails at its fourth loss at the earliest:
others may have caused the first two, and the first one alone may be chance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

SUSPICIOUS_LOSSES = 2
CONVICTING_LOSSES = 2


class Quarantine:
    """Counts losses per request and decides which requests may run. Requests are named by id."""

    def __init__(self) -> None:
        self._losses: dict[str, int] = {}
        self._suspects: deque[str] = deque()
        self._lost_alone = 0

    @property
    def lone(self) -> str | None:
        """The only request that may run now; None = all may."""
        return self._suspects[0] if self._suspects else None

    def watches(self, request_id: str) -> bool:
        """Whether a request was in flight at a loss and is not cleared."""
        return request_id in self._losses

    def lost(self, in_flight: Iterable[str]) -> str | None:
        """A stage died with these requests in flight. Returns the culprit if it is certain, else None."""
        present = set(in_flight)
        if self._suspects:
            lone = self._suspects[0]
            if lone not in present:
                return None
            self._lost_alone += 1
            if self._lost_alone < CONVICTING_LOSSES:
                return None
            self.cleared(lone)
            return lone
        self._losses = {request: self._losses.get(request, 0) + 1 for request in sorted(present)}
        self._suspects.extend(r for r, losses in self._losses.items() if losses >= SUSPICIOUS_LOSSES)
        return None

    def cleared(self, request_id: str) -> None:
        """The request gained a token since its last loss, or ended."""
        self._losses.pop(request_id, None)
        if request_id == self.lone:
            self._lost_alone = 0
        if request_id in self._suspects:
            self._suspects.remove(request_id)
