"""A reshape under way: the shape to return to, and the future of those who wait for its end."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from ppserve.errors import ReshapeFailed
from ppserve.head.engine import patience
from ppserve.head.engine.member import Decision


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a pipeline's epochs, and how many KV blocks these have."""

    decision: Decision
    num_blocks: int | None  # None until one of its epochs begins to form


@dataclass(slots=True)
class Reshape:
    """A change to a shape of which no epoch has formed yet.

    It is taken back if a rank cannot load its layers or has no memory, if the shape has no room for one full
    sequence, if a rank does not come back soon, or at the last of `patience.MAX_SETBACKS`.
    """

    before: Shape
    """The latest shape of which an epoch has formed."""
    formed: Future[int]
    """It gets the number of the first epoch that has formed; else a ReshapeFailed, or the error that ended all."""
    num_setbacks: int = 0
    """How often a rank died or an epoch did not form."""

    def count_setback(self) -> bool:
        """Count a setback. Return whether it was one too many."""
        self.num_setbacks += 1
        return self.num_setbacks == patience.MAX_SETBACKS

    def fail(self, reason: str) -> None:
        self.formed.set_exception(ReshapeFailed(reason))
