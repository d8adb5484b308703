"""Which guesses pay, by measurement: the ways of running take turns, and the fastest gets nearly all the turns.

The cost model cannot know everything that a guess costs: stages that share cores, memory or Python's lock slow
each other down, so that a step on a guess is not free although it fills a gap. So what counts is the time from
token to token of the running sequences. Other numbers of sequences are other trials.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from math import sqrt
from statistics import median_low

# Tokens in a turn.
TURN = 16
# The middle one of so many comparisons counts, so that one stall (a kernel that is loaded at its first use)
# decides nothing.
REMEMBERED = 3
# A slower way is tried after so many turns; after twice as many each time that it is slower again, and more if
# much slower.
FIRST_TRIAL, LAST_TRIAL = 8, 128
# The turns before and after a trial may differ by this factor. If they differ by more, the machine has changed
# meanwhile, and the trial is repeated, up to so many times.
UNSTEADY, MAX_UNSTEADY = 1.5, 2
# Steps at the beginning of each turn of trying WIDE.
EXPLORED = 3
# A way with guesses must be faster by this factor than the one without: by about what turns differ by chance. With
# less, a way that is no better gets half of the turns.
MARGIN = 1.04


class Way(IntEnum):
    """PLAIN: no guesses. WIDE: as further rows in steps of known tokens. DEEP: in steps of their own as well."""

    PLAIN = 0
    WIDE = 1
    DEEP = 2


class _Trial:
    """Of one number of sequences. best: the way that was fastest so far.

    A machine with other work is at times several times as slow, and a text is at times easy to guess. So a way
    that is tried is compared with the turns of the best way right before and after it, never with older ones; and
    only such ratios are remembered.
    """

    def __init__(self) -> None:
        self.best = self._tried = Way.PLAIN
        self._seconds, self._tokens = 0.0, 0
        # Times per token: of the latest turn of the best way, and of the turn between it and the next such one.
        self._best_pace: float | None = None
        self._tried_pace: float | None = None
        self._judged_pace: float | None = None
        self._num_unsteady = 0
        # Times per token of the other ways, in those of the best one.
        self._ratios: dict[Way, deque[float]] = {way: deque(maxlen=REMEMBERED) for way in Way}
        self._try_in = self._interval = 0

    def add(self, seconds: float, tokens: int) -> None:
        """Tokens of the turn that is running."""
        self._seconds += seconds
        self._tokens += tokens

    def next_way(self, ended: Way, has_guessed: bool) -> Way:
        """The way of the next turn. ended: that of the last one. has_guessed: whether there were guesses in it; a
        trial without says nothing, and costs nothing, so there may be another one soon."""
        pace = self._seconds / self._tokens if self._tokens else None
        self._seconds, self._tokens = 0.0, 0
        if ended is not self.best:
            # Another number of sequences may have begun the turn, to try another way.
            is_trial = ended is self._tried and (has_guessed or ended is Way.PLAIN)
            self._tried_pace = pace if is_trial else None
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
        if self.best and self._judged_pace is not None and pace > UNSTEADY * self._judged_pace:
            # Perhaps it is guesses that have become slow, which nobody need bear.
            self._judged_pace, self._tried = None, Way.DEEP
            self._try_in = self._interval = 0
        self._try_in -= 1
        return self.best if self._try_in > 0 else self._next_to_try()

    def _judge(self, ratio: float) -> Way:
        """The way of the next turn. ratio: of the way that was tried to the best one."""
        ratios = self._ratios[self._tried]
        ratios.append(ratio)
        usual = median_low(ratios)
        margin = MARGIN ** ((self._tried is not Way.PLAIN) - (self.best is not Way.PLAIN))
        if usual * margin < 1:
            self._make_best(self._tried, usual)
        elif ratio * margin < 1:
            return self._tried  # once more, at once
        elif any(not ratios for way, ratios in self._ratios.items() if way is not self.best):
            self._try_in = 0
        else:
            self._interval = min(int(2 * max(self._interval, FIRST_TRIAL // 2) * max(1.0, usual)), LAST_TRIAL)
            self._try_in = self._interval
        return self.best

    def _make_best(self, way: Way, ratio: float) -> None:
        for ratios in self._ratios.values():
            for place, other in enumerate(ratios):
                ratios[place] = other / ratio
        self._ratios[self.best].append(1 / ratio)
        self._ratios[way].clear()
        self.best, self._best_pace = way, None
        self._try_in = self._interval = FIRST_TRIAL

    def _next_to_try(self) -> Way:
        others = [way for way in Way if way is not self.best]
        unknown = [way for way in others if not self._ratios[way]]
        self._tried = (unknown or [way for way in others if way > self._tried] or others)[0]
        return self._tried


class GuessTrial:
    """way: of running now."""

    def __init__(self) -> None:
        self.way = Way.PLAIN
        self._num_to_explore = 0
        self._is_exploring = False
        self._trials: dict[int, _Trial] = {}
        self._since_s = 0.0
        self._has_guessed = False
        self._tokens_left = TURN

    def explore(self) -> bool:
        """Whether the next step takes guesses whatever a row costs, so that the cost model learns it.

        The step's time does not count.
        """
        if not self._num_to_explore:
            return False
        self._num_to_explore -= 1
        self._is_exploring = True
        return True

    def guessed(self) -> None:
        """A step takes guesses."""
        self._has_guessed = True

    def observe(self, num_sequences: int, began_s: float, ended_s: float, num_tokens: int) -> None:
        """A sequence got tokens at `ended_s`, and its ones before at `began_s`. num_sequences: that are
        running."""
        trial = self._trials.setdefault(num_sequences.bit_length(), _Trial())
        if began_s >= self._since_s and not self._is_exploring:
            trial.add(ended_s - began_s, num_tokens)
        self._is_exploring = False
        self._tokens_left -= num_tokens
        if self._tokens_left <= 0:
            was = self.way
            self.way = trial.next_way(was, self._has_guessed)
            self._has_guessed = False
            self._num_to_explore = EXPLORED if self.way is Way.WIDE is not trial.best else 0
            self._tokens_left = TURN * num_sequences
            if self.way != was:
                self._since_s = ended_s
