"""Finding the request that kills stages without failing its neighbours.

Losing a stage says nothing about who was to blame: everything in flight is replayed. A request that was
in flight at two losses without having gained a token between them, the second time in its replay, becomes
a suspect. Suspects are replayed alone, one after the other, and everybody else waits for that short while:
a suspect that gets past the place where it stood is cleared; one whose stage dies while it is alone in the
pipeline is the culprit. So a request fails when its replay has killed a stage twice, at the third loss of
all: company may be guilty of the first two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

SUSPICIOUS_LOSSES = 2


class Quarantine:
    """Counts losses per request id and says who may run."""

    def __init__(self) -> None:
        self._losses: dict[str, int] = {}
        self._suspects: deque[str] = deque()

    @property
    def lone(self) -> str | None:
        """The only request that may run now; None = everybody may."""
        return self._suspects[0] if self._suspects else None

    def watches(self, request_id: str) -> bool:
        """Whether a request has a loss on its record."""
        return request_id in self._losses

    def lost(self, in_flight: Iterable[str]) -> str | None:
        """A stage died with these requests in flight. The culprit, if that is certain."""
        present = set(in_flight)
        if self._suspects:
            lone = self._suspects[0]
            if lone not in present:
                return None
            self.cleared(lone)
            return lone
        self._losses = {request: self._losses.get(request, 0) + 1 for request in sorted(present)}
        self._suspects.extend(r for r, losses in self._losses.items() if losses >= SUSPICIOUS_LOSSES)
        return None

    def cleared(self, request_id: str) -> None:
        """The request got past the place where it stood at its last loss, or ended."""
        self._losses.pop(request_id, None)
        if request_id in self._suspects:
            self._suspects.remove(request_id)
