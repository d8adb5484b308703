"""Which of several ways is faster, by trying them in turns.

A machine with other work is at times several times as slow, and some passages of work are easier than others. So
a way that is tried is compared with the turns of the best way right before and after it, never with older ones;
and only such ratios are remembered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import sqrt
from statistics import median_low

# The middle one of so many comparisons counts, so that one stall (a kernel that is loaded at its first use)
# decides nothing.
REMEMBERED = 3
# A slower way is tried after so many turns; after twice as many each time that it is slower again, and more if
# much slower.
FIRST_TRIAL, LAST_TRIAL = 8, 128
# A trial that says nothing is repeated after so many turns.
NEXT_UNCOUNTED = 4
# The turns before and after a trial may differ by this factor. If they differ by more, the machine has changed
# meanwhile, and the trial is repeated, up to so many times.
UNSTEADY, MAX_UNSTEADY = 1.5, 2
# A turn of another way has lost when it has taken this many times what the best way needs for a whole one.
LOST = 4.0


class Trial:
    """ways: ascending, as they are tried, the simplest first. margin: a way must be faster than a simpler one by
    this factor: by about what turns differ by chance. With less, a way that is no better gets half of the turns.
    best: the way that was fastest so far.
    """

    def __init__(self, ways: Sequence[int], margin: float) -> None:
        self._ways, self._margin = ways, margin
        self.best = self._tried = self._plain = ways[0]
        self._seconds, self._tokens = 0.0, 0
        # Times per token: of the latest turn of the best way, and of the turn between it and the next such one.
        self._best_pace: float | None = None
        self._tried_pace: float | None = None
        self._judged_pace: float | None = None
        self._num_unsteady = 0
        # Times per token of the other ways, in those of the best one.
        self._ratios: dict[int, deque[float]] = {way: deque(maxlen=REMEMBERED) for way in ways}
        # Those whose latest trial said nothing. They are tried in turn with the others, not first.
        self._silent: set[int] = set()
        self._try_in = self._interval = 0

    def add(self, seconds: float, tokens: int) -> None:
        """Tokens of the turn that is running."""
        self._seconds += seconds
        self._tokens += tokens

    def has_lost(self, way: int, tokens: int) -> bool:
        """Whether the turn that is running, of `tokens` tokens, need not be ended: another way than the best has
        already taken too long for it."""
        return way != self.best and self._best_pace is not None and self._seconds > LOST * tokens * self._best_pace

    def forget_turn(self) -> None:
        """The turn that is running will have no end."""
        self._seconds, self._tokens = 0.0, 0

    def give_up(self) -> int:
        """The turn that is running, of another way than the best, will have no end; returns the best. The next
        trial comes later each time."""
        self.forget_turn()
        self._interval = min(max(2 * self._interval, FIRST_TRIAL), LAST_TRIAL)
        self._try_in = self._interval
        return self.best

    def next_way(self, ended: int, counts: bool = True) -> int:
        """The way of the next turn. ended: that of the last one. counts: whether the turn really made use of it;
        if not, a trial of it says nothing, and has cost little, so there may be another one soon."""
        pace = self._seconds / self._tokens if self._tokens else None
        self.forget_turn()
        if ended != self.best:
            # A trial of another kind of load may have begun the turn, to try another way.
            is_trial = ended == self._tried and (counts or ended == self._plain)
            self._tried_pace = pace if is_trial else None
            if is_trial:
                self._silent.discard(ended)
            elif ended == self._tried:
                self._silent.add(ended)
                self._try_in = max(self._try_in, NEXT_UNCOUNTED)
            return self.best
        before, tried = self._best_pace, self._tried_pace
        self._best_pace, self._tried_pace = pace, None
        if pace is None:
            return self.best
        if before is not None and tried is not None:
            if max(before, pace) > UNSTEADY * min(before, pace) and self._num_unsteady < MAX_UNSTEADY:
                self._num_unsteady += 1
                return self._tried
            self._num_unsteady = 0
            self._judged_pace = pace
            return self._judge(tried / sqrt(before * pace))
        has_slowed = self._judged_pace is not None and pace > UNSTEADY * self._judged_pace
        if self.best != self._plain and has_slowed:
            # Perhaps only this way has become slow: another one is tried at once.
            self._judged_pace, self._tried = None, self._ways[-1]
            self._try_in = self._interval = 0
        self._try_in -= 1
        return self.best if self._try_in > 0 else self._next_to_try()

    def _judge(self, ratio: float) -> int:
        """The way of the next turn. ratio: of the way that was tried to the best one."""
        ratios = self._ratios[self._tried]
        ratios.append(ratio)
        usual = median_low(ratios)
        margin = self._margin if self._tried > self.best else 1 / self._margin
        if usual * margin < 1:
            self._make_best(self._tried, usual)
        elif ratio * margin < 1:
            return self._tried  # once more, at once
        elif self._unknown():
            self._try_in = 0
        else:
            # A turn that one pause has ended early looks worse than it was.
            slower = min(max(1.0, usual), LOST)
            self._interval = min(int(2 * max(self._interval, FIRST_TRIAL // 2) * slower), LAST_TRIAL)
            self._try_in = self._interval
        return self.best

    def _make_best(self, way: int, ratio: float) -> None:
        for ratios in self._ratios.values():
            for place, other in enumerate(ratios):
                ratios[place] = other / ratio
        self._ratios[self.best].append(1 / ratio)
        self._ratios[way].clear()
        self.best, self._best_pace = way, None
        self._try_in = self._interval = FIRST_TRIAL

    def _next_to_try(self) -> int:
        others = [way for way in self._ways if way != self.best]
        self._tried = (self._unknown() or [way for way in others if way > self._tried] or others)[0]
        return self._tried

    def _unknown(self) -> list[int]:
        return [way for way in self._ways if way not in (self.best, *self._silent) and not self._ratios[way]]
