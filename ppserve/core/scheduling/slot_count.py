"""Chooses how many steps are kept in flight: as many as the P stages, or one more.

With P slots a step is sent only when an earlier one has returned, so whatever delays one stage (the return of
tokens, a chunk of a prompt, another program on its core) delays all. With one slot more the stages have a step to
compute meanwhile. But every step is smaller, and one more per round pays the fixed cost of a step.

Per step of the busiest stage, let s be its computation, c the part of s that does not depend on the step's size
(mostly reading weights), o the stage's other work (inputs, sending) and w its waiting. The same tokens take
P·(s + o + w) with P slots, and P·s + c + (P + 1)·o with P + 1 slots if nothing waits any more. So P + 1 can be
faster only if

    w > (c + o) / P.

Whether it is, only a trial tells. Where stages, head and callers share cores, one more step is more work for cores
that are taken, and waiting is the time in which others compute. So where waiting is long enough both are tried in
turns, and the time for a token decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ppserve.core.plan import StepPlan, StepResult, StepStamps
from ppserve.core.scheduling.trial import Trial

# Steps in a turn that count.
TURN = 64
# By which P + 1 must be faster.
MARGIN = 1.03
# Waiting of a smaller share of the computation is no reason to try it.
MIN_WAIT = 0.02
# A trial ends when so many turns of the other kind have ended in it.
MAX_OTHERS = 2
_FADE = 0.98


class SlotCount:
    """choice: of P and P + 1, for now. fixed_s: seconds of a step on a stage that do not depend on its size, by
    the current estimate.

    What counts is the time between steps that follow each other while all slots are in use. Steps with tokens of
    prompts and steps without have trials and turns of their own, because they take other times. Only one of the
    trials goes on at any time.
    """

    def __init__(self, num_stages: int, fixed_s: Callable[[int], float]) -> None:
        self.choice = self._num_stages = num_stages
        self._waits = _Waits(num_stages, fixed_s)
        ways = (num_stages, num_stages + 1)
        self._trials = {phase: Trial(ways, MARGIN) for phase in ("mixed", "decode")}
        # Steps of each kind in its turn that is running.
        self._num_steps: Counter[str] = Counter()
        # The kind for which another way is being tried, and turns of the other kind that ended meanwhile.
        self._tried_for: str | None = None
        self._num_others = 0
        # The step before on the last stage, where it counts: its phase, and when the stage was done with it.
        self._before: tuple[str, int] | None = None
        # Steps that were sent in the turn before.
        self._num_older = 0

    def observe(self, plan: StepPlan, result: StepResult, was_full: bool, num_tokens: int = 0) -> int:
        """A stage's next step; returns the choice. was_full: all slots were in use when it was sent. num_tokens:
        that the last stage's result brought, without those drawn after wrong draft tokens."""
        if self._num_stages > 1:
            self._waits.observe(result.stage, result.stamps, was_full)
            if result.stage == self._num_stages - 1:
                self._ended(plan.phase, result.stamps.sent, was_full, num_tokens)
        return self.choice

    def lost(self) -> None:
        """The epoch is lost: the next step of a stage does not follow its last one."""
        self._before = None
        self._waits.break_off()

    def _ended(self, phase: str, sent_ns: int, was_full: bool, num_tokens: int) -> None:
        before, counts = self._before, was_full and phase in self._trials and not self._num_older
        self._before = (phase, sent_ns) if counts else None
        self._num_older = max(0, self._num_older - 1)
        if counts and before is not None and before[0] == phase:
            self._trials[phase].add((sent_ns - before[1]) / 1e9, num_tokens)
            self._num_steps[phase] += 1
            if self._num_steps[phase] == TURN:
                self._num_steps[phase] = 0
                self._end_turn(phase)

    def _end_turn(self, phase: str) -> None:
        trial = self._trials[phase]
        if self._tried_for not in (None, phase):
            trial.forget_turn()
            self._num_others += 1
            if self._num_others < MAX_OTHERS:
                return
            # The kind that it is tried for has become rare.
            phase, trial = self._tried_for, self._trials[self._tried_for]
            choice = trial.give_up()
        else:
            choice = trial.next_way(self.choice)
        if choice != trial.best == self._num_stages and not self._waits.may_be_saved():
            choice = self._num_stages
        self._tried_for, self._num_others = phase if choice != trial.best else None, 0
        if choice != self.choice:
            self._num_steps.clear()
            for each in self._trials.values():
                each.forget_turn()
            self.choice, self._num_older, self._before = choice, self._num_stages + 1, None
            self._waits = _Waits(self._num_stages, self._waits.fixed_s)


class _Waits:
    """How long each stage computed, had other work and waited, with the same number of slots. Older steps weigh
    less."""

    def __init__(self, num_stages: int, fixed_s: Callable[[int], float]) -> None:
        self.fixed_s = fixed_s
        self._num_stages = num_stages
        self._sent_ns: list[int | None] = [None] * num_stages
        self._waited_s, self._own_s, self._computed_s = ([0.0] * num_stages for _ in range(3))
        self._num_steps = [0] * num_stages

    def observe(self, stage: int, at: StepStamps, was_full: bool) -> None:
        before_ns, self._sent_ns[stage] = self._sent_ns[stage], at.sent if was_full else None
        if not was_full or before_ns is None:
            return
        free_ns = max(before_ns, at.planned)
        own_ns = at.awaited - free_ns + at.begun - at.received + at.sent - at.ended
        _fade_in(self._waited_s, stage, free_ns - before_ns + at.received - at.awaited)
        _fade_in(self._own_s, stage, own_ns)
        _fade_in(self._computed_s, stage, at.ended - at.begun)
        self._num_steps[stage] += 1

    def break_off(self) -> None:
        self._sent_ns = [None] * self._num_stages

    def may_be_saved(self) -> bool:
        """Whether the busiest stage of P slots waits longer than one more slot costs."""
        busiest = max(range(self._num_stages), key=self._computed_s.__getitem__)
        if not (computed_s := self._computed_s[busiest]):
            return False
        weights = (1 - _FADE ** self._num_steps[busiest]) / (1 - _FADE)
        fixed_s = min(self.fixed_s(busiest) * weights, computed_s) + self._own_s[busiest]
        return self._waited_s[busiest] > max(MIN_WAIT * computed_s, fixed_s / self._num_stages)


def _fade_in(sums_s: list[float], stage: int, ns: int) -> None:
    sums_s[stage] = sums_s[stage] * _FADE + max(0, ns) / 1e9
