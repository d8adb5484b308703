"""How many steps to keep in flight: as many as stages, or one more.

With P lanes every step waits for the one before it to come back, so whatever delays one stage (a token's way
back, a prompt's chunk, another program on its core) delays all. One lane more lets a stage go on meanwhile, but
makes every step smaller, and each pays the step's fixed cost again. Let the busiest stage compute for s and
wait for w per step, let c of s be paid however small the step is (reading the weights, mostly), and o be the
stage's own work around it (inputs, sending). The same tokens take P·(s + o + w) with P lanes and, once nothing
waits, P·s + c + (P + 1)·o with P + 1. So the further lane pays where

    w > (c + o) / P.

Where s is flat (c = s) that is when tokens take longer to return than a stage computes; on CPUs, where steps
of many rows cost by the row, a few percent of waiting are enough.
"""

from __future__ import annotations

from collections.abc import Callable

from ppserve.core.plan import StepStamps

FADE = 0.98
MIN_STEPS = 64
# Changes its mind only when the two differ clearly, and only for waiting of more than this share of computing.
MARGIN = 1.25
MIN_WAIT = 0.02
# What was waited with P lanes can only be seen with P: after so many steps it looks again.
PROBE_STEPS = 4096


class LaneCount:
    """Chooses P or P + 1 from what stages computed and waited, and from their fixed costs.

    fixed_s: what a step costs on a stage however small it is, as far as is known now.
    """

    def __init__(self, num_stages: int, fixed_s: Callable[[int], float]) -> None:
        self.num_stages = num_stages
        self.choice = num_stages
        self._fixed_s = fixed_s
        self._sent_ns: list[int | None] = [None] * num_stages
        self._waited_s = [0.0] * num_stages
        self._own_s = [0.0] * num_stages
        self._computed_s = [0.0] * num_stages
        self._num_steps = 0
        self._waiting = 0.0

    def observe(self, stage: int, at: StepStamps, was_full: bool) -> int:
        """A stage's step in its order; the choice so far. was_full: all lanes were in use when it was sent."""
        before_ns, self._sent_ns[stage] = self._sent_ns[stage], at.sent if was_full else None
        if self.num_stages == 1 or not was_full or before_ns is None:
            return self.choice
        free_ns = max(before_ns, at.planned)
        own_ns = at.awaited - free_ns + at.begun - at.received + at.sent - at.ended
        _fade_in(self._waited_s, stage, free_ns - before_ns + at.received - at.awaited)
        _fade_in(self._own_s, stage, own_ns)
        _fade_in(self._computed_s, stage, at.ended - at.begun)
        if stage == self.num_stages - 1:
            self._num_steps += 1
            if self._num_steps >= MIN_STEPS:
                self._decide()
        return self.choice

    def lost(self) -> None:
        """The pipeline broke: what comes next does not follow what was."""
        self._sent_ns = [None] * self.num_stages

    def _decide(self) -> None:
        busiest = max(range(self.num_stages), key=self._computed_s.__getitem__)
        fixed = self._fixed_share(busiest)
        if self.choice == self.num_stages:
            self._waiting = self._waited_s[busiest] / self._computed_s[busiest]
            if self._waiting > max(MIN_WAIT, MARGIN * fixed / self.num_stages):
                self._choose(self.num_stages + 1)
        elif self._num_steps >= PROBE_STEPS or self._waiting * MARGIN < fixed / self.num_stages:
            self._choose(self.num_stages)

    def _fixed_share(self, stage: int) -> float:
        """What a step costs on this stage however small it is, as a share of computing one with P lanes."""
        steps = (1 - FADE**self._num_steps) / (1 - FADE)
        computed_s = self._computed_s[stage] / steps
        own_s = self._own_s[stage] / steps
        fixed_s = min(self._fixed_s(stage), computed_s)
        if self.choice > self.num_stages:
            computed_s = fixed_s + (computed_s - fixed_s) * self.choice / self.num_stages
        return (fixed_s + own_s) / computed_s

    def _choose(self, num_lanes: int) -> None:
        self.choice = num_lanes
        self._num_steps = 0
        for sums in (self._waited_s, self._own_s, self._computed_s):
            sums[:] = [0.0] * self.num_stages


def _fade_in(sums_s: list[float], stage: int, ns: int) -> None:
    sums_s[stage] = sums_s[stage] * FADE + max(0, ns) / 1e9
