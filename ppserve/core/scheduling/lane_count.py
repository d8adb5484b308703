"""Chooses how many steps are kept in flight: as many as the P stages, or one more.

With P lanes a step is sent only when an earlier one has returned, so whatever delays one stage (the return of
tokens, a chunk of a prompt, another program on its core) delays all. With one lane more the stages have a step to
compute meanwhile, but every step is smaller, and one more per round pays the fixed cost of a step.

Per step of the busiest stage, let s be its computation, c the part of s that does not depend on the step's size
(mostly reading weights), o the stage's other work (inputs, sending) and w its waiting. The same tokens take
P·(s + o + w) with P lanes, and P·s + c + (P + 1)·o with P + 1 lanes if nothing waits any more. So P + 1 is faster
if

    w > (c + o) / P.

If s does not depend on the size at all (c = s), w must exceed s / P. On CPUs, where the time of large steps is
nearly proportional to their rows, waiting of a few percent is enough.
"""

from __future__ import annotations

from collections.abc import Callable

from ppserve.core.plan import StepStamps

FADE = 0.98
MIN_STEPS = 64
# P + 1 is chosen only where w exceeds the bound by this factor, and exceeds this share of the computation.
MARGIN = 1.25
MIN_WAIT = 0.02
# Waiting with P lanes can only be measured with P lanes: after so many steps with P + 1 it is measured again.
PROBE_STEPS = 4096


class LaneCount:
    """Chooses P or P + 1 from the stamps of steps.

    fixed_s: seconds of a step on a stage that do not depend on its size, by the current estimate.
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
        """A stage's next step; returns the choice. was_full: all lanes were in use when it was sent."""
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
        """The epoch is lost: the next step of a stage does not follow its last one."""
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
        """(c + o) of this stage as a share of s with P lanes."""
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
