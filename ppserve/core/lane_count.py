"""How many steps to keep in flight: as many as stages, or one more.

With m lanes, B decodes, stage time s and return time h (from the last stage's end to the next plan on
the first stage), throughput is B / max(P·s(B/m) + h, m·s(B/m)). While h is short, a lane more only makes
every step smaller, and where s is flat it costs 1/(P+1) of the throughput. Once h exceeds s, the first
stage would stand idle for longer than a step takes: then one more lane pays.
"""

from __future__ import annotations

FADE = 0.98
MIN_STEPS = 32
MARGIN = 1.2


class LaneCount:
    """Chooses P or P + 1 from measured times, and changes its mind only when they differ clearly."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.choice = num_stages
        self._return_s = 0.0
        self._stage_s = 0.0
        self._num_steps = 0

    def observe(self, return_s: float, slowest_stage_s: float) -> int:
        """One step's return time and its longest time on one stage, both in seconds; the choice so far."""
        self._return_s = self._return_s * FADE + return_s
        self._stage_s = self._stage_s * FADE + slowest_stage_s
        self._num_steps += 1
        if self._num_steps >= MIN_STEPS and self.num_stages > 1:
            if self._return_s > MARGIN * self._stage_s:
                self.choice = self.num_stages + 1
            elif self._return_s * MARGIN < self._stage_s:
                self.choice = self.num_stages
        return self.choice
