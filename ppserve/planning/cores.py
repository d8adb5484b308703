"""Cores are shared: ranks, the head and callers on one host take them from each other.

Whoever computes for long, a rank, takes the core that is free first, and waits for it. Whoever computes for
short, the head or a caller, has slept before and is let in at once: on an idle core or, where there is none, in
the middle of a rank's step, which takes so much longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SharedCores:
    """A host's. cores: that its processes may use. ranks: those on it; with rank 0 comes the head. threads: of
    each rank. caller_s: what callers on it compute for each token that they get."""

    cores: int
    ranks: tuple[int, ...]
    threads: int = 1
    caller_s: float = 0.0

    @property
    def are_scarce(self) -> bool:
        """No core is left for the head and callers."""
        return len(self.ranks) * self.threads >= self.cores


@dataclass(slots=True)
class Turn:
    """Of a rank on a core. ended_s: as long as nobody interrupts it."""

    ended_s: float


@dataclass(slots=True)
class _Core:
    free_s: float = 0.0
    turns: list[Turn] = field(default_factory=list)


class Cores:
    """Of a host that is simulated. Is asked in the order of time: a core that was taken for later would be missed
    by whoever needs it before."""

    def __init__(self, of: SharedCores) -> None:
        self.of = of
        self._cores = [_Core() for _ in range(of.cores)]

    def take(self, now_s: float, seconds: float) -> Turn:
        """For a thread of a rank, which computes that long."""
        core = self._first_free()
        core.free_s = max(now_s, core.free_s) + seconds
        core.turns.append(turn := Turn(core.free_s))
        return turn

    def interrupt(self, now_s: float, seconds: float) -> None:
        """Somebody computes that long, at once."""
        core = self._first_free()
        core.free_s = max(now_s, core.free_s) + seconds
        core.turns = [turn for turn in core.turns if turn.ended_s > now_s]
        for turn in core.turns:
            turn.ended_s += seconds

    def _first_free(self) -> _Core:
        return min(self._cores, key=lambda core: core.free_s)
