"""How the tensor ranks of a stage share things out: heads, and the outputs of every matrix."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """Consecutive things that the tensor ranks of a stage have shared out. widths: how many each rank has."""

    widths: tuple[int, ...]
    rank: int

    @classmethod
    def of(cls, size: int, rank: int, count: int) -> Cut:
        """`size` things among `count` ranks: as evenly as they go, the first ranks have one more."""
        return cls(tuple(size // count + (i < size % count) for i in range(count)), rank)

    def times(self, factor: int) -> Cut:
        """This cut in smaller units: each of its things consists of `factor` of them."""
        return Cut(tuple(width * factor for width in self.widths), self.rank)

    @property
    def size(self) -> int:
        return sum(self.widths)

    @property
    def width(self) -> int:
        """This rank's own."""
        return self.widths[self.rank]

    @property
    def first(self) -> int:
        return sum(self.widths[: self.rank])

    @property
    def own(self) -> slice:
        return slice(self.first, self.first + self.width)
