"""How many steps to keep in flight: as many as stages, or one more.

With P lanes every step waits for the one before it to come back, so whatever delays one stage (a token's way
back, a prompt's chunk, another program on its core) delays all. One lane more lets a stage go on meanwhile, but
makes every step smaller, and each pays the step's fixed cost again. Let the busiest stage compute for s and
wait for w per step, and let c of s be paid however small the step is (reading the weights, mostly). The same
tokens take P·(s + w) with P lanes and, once nothing waits, P·s + c with P + 1. So the further lane pays where

    w > c / P.

Where s is flat (c = s) that is when tokens take longer to return than a stage computes; on CPUs, where steps
of many rows cost by the row, a few percent of waiting are enough.
"""

from __future__ import annotations

from collections.abc import Callable

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
        self._last_end_s: list[float | None] = [None] * num_stages
        self._waited_s = [0.0] * num_stages
        self._computed_s = [0.0] * num_stages
        self._num_steps = 0
        self._waiting = 0.0

    def observe(self, stage: int, begun_s: float, ended_s: float, was_full: bool) -> int:
        """A stage's step in its order; the choice so far. was_full: all lanes were in use when it was sent."""
        before_s, self._last_end_s[stage] = self._last_end_s[stage], ended_s if was_full else None
        if self.num_stages == 1 or not was_full or before_s is None:
            return self.choice
        self._waited_s[stage] = self._waited_s[stage] * FADE + max(0.0, begun_s - before_s)
        self._computed_s[stage] = self._computed_s[stage] * FADE + ended_s - begun_s
        if stage == self.num_stages - 1:
            self._num_steps += 1
            if self._num_steps >= MIN_STEPS:
                self._decide()
        return self.choice

    def lost(self) -> None:
        """The pipeline broke: what comes next does not follow what was."""
        self._last_end_s = [None] * self.num_stages

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
        """Of a step with P lanes on this stage: what it costs however small it is."""
        steps = (1 - FADE**self._num_steps) / (1 - FADE)
        computed_s = self._computed_s[stage] / steps
        fixed_s = min(self._fixed_s(stage), computed_s)
        if self.choice > self.num_stages:
            computed_s = fixed_s + (computed_s - fixed_s) * self.choice / self.num_stages
        return fixed_s / computed_s

    def _choose(self, num_lanes: int) -> None:
        self.choice = num_lanes
        self._num_steps = 0
        self._waited_s = [0.0] * self.num_stages
        self._computed_s = [0.0] * self.num_stages
