"""Poison-request isolation: finds the request that kills stages, without failing others.

The loss of a stage does not show which request caused it, so everything in flight is replayed. A request that was
in flight at two losses, and gained no token between them, becomes a suspect. Suspects are replayed alone, one
after the other, while all other requests wait. A suspect that gains a token is cleared. A suspect fails if, while
it was alone in the pipeline, the same rank failed twice in the same way, or ranks failed four times. So a request
fails at its fourth loss at the earliest. If no rank failed, as when a network is cut, no request is to blame.

If an epoch is lost before any of its steps returned, the next one begins with a probe, a step without a request.
If the probe returns, the stages work, however many requests kill them, and restarts are counted anew. If a stage
dies of it, no request is to blame. The first epoch needs no probe: stages that have just formed work.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Set

from ppserve.core.plan import Draw, Slice
from ppserve.core.request import SamplingParams

PROBE = Slice(-1, 0, (0,), (0,), Draw(SamplingParams(temperature=0.0)))
"""One token. It is computed while nothing that its block holds can be used."""
SUSPICIOUS_LOSSES = 2
_CONVICTING_LOSSES_OF_ONE_RANK = 2
_CONVICTING_LOSSES = 4


class PoisonIsolation:
    """The number of losses of each request, and the suspects. Requests are named by id."""

    def __init__(self) -> None:
        self._losses: dict[str, int] = {}
        self._suspects: list[str] = []
        self._failures: list[Set[Hashable]] = []  # at each loss of the lone request: which ranks failed, and how

    @property
    def lone(self) -> str | None:
        """The only request that may run now; None = all may."""
        return self._suspects[0] if self._suspects else None

    @property
    def suspects(self) -> Collection[str]:
        """The requests that may run only alone."""
        return self._suspects

    def watches(self, request_id: str) -> bool:
        """Whether a request was in flight at a loss and is not cleared."""
        return request_id in self._losses

    def record_loss(self, in_flight: Set[str], failed: Set[Hashable]) -> str | None:
        """Ranks failed with these requests in flight. Returns the culprit if it is certain, else None.

        failed: each by its place in the pipeline and how it failed.
        """
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
            if self._losses[request] >= SUSPICIOUS_LOSSES and request not in self._suspects:
                self._suspects.append(request)
        return None

    def clear(self, request_id: str) -> None:
        """The request gained a token since its last loss, or ended."""
        self._losses.pop(request_id, None)
        if request_id == self.lone:
            self._failures = []
        if request_id in self._suspects:
            self._suspects.remove(request_id)
