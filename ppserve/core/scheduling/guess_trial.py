"""Which guesses pay, by measurement: the ways of running take turns, and the fastest gets nearly all the turns.

The cost model cannot know everything that a guess costs: stages that share cores, memory or Python's lock slow
each other down, so that a step on a guess is not free although it fills a gap. So what counts is the time from
token to token of the running sequences. Other numbers of sequences are other trials.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from statistics import median_low

# Tokens in a turn.
TURN = 16
# The middle one of so many turns counts, so that one stall (a kernel that is loaded at its first use) decides
# nothing.
REMEMBERED = 3
# A slower way gets one turn in so many; twice as many each time that it is slower again, and more if much slower.
FIRST_PROBE, LAST_PROBE = 8, 128
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


class _Turns:
    """The latest turns of one way: seconds per token."""

    def __init__(self) -> None:
        self._ended: deque[float] = deque(maxlen=REMEMBERED)
        self._seconds, self._tokens = 0.0, 0

    @property
    def pace(self) -> float | None:
        return median_low(self._ended) if self._ended else None

    def add(self, seconds: float, tokens: int) -> None:
        self._seconds += seconds
        self._tokens += tokens

    def end(self) -> None:
        if self._tokens:
            self._ended.append(self._seconds / self._tokens)
        self._seconds, self._tokens = 0.0, 0


class _Trial:
    """Of one number of sequences. best: the way that was fastest so far."""

    def __init__(self) -> None:
        self.turns = {way: _Turns() for way in Way}
        self.best = self._probed = Way.PLAIN
        self._probe_in = self._interval = FIRST_PROBE

    def next_way(self, ended: Way) -> Way:
        """The way of the next turn. ended: that of the last one."""
        self.turns[ended].end()
        paces: dict[Way, float] = {}
        for way, turns in self.turns.items():
            if turns.pace is None:
                return way
            paces[way] = turns.pace * (MARGIN if way else 1.0)
        best = min(paces, key=paces.__getitem__)
        if best != self.best:
            self.best = best
            self._probe_in = self._interval = FIRST_PROBE
        elif ended != best:  # a probe, which was slower again
            longer = int(2 * self._interval * paces[ended] / paces[best])
            self._probe_in = self._interval = min(longer, LAST_PROBE)
        else:
            self._probe_in -= 1
        if self._probe_in:
            return best
        others = [way for way in Way if way != best]
        self._probed = next((way for way in others if way > self._probed), others[0])
        return self._probed


class GuessTrial:
    """way: of running now."""

    def __init__(self) -> None:
        self.way = Way.PLAIN
        self._num_to_explore = 0
        self._is_exploring = False
        self._trials: dict[int, _Trial] = {}
        self._since_s = 0.0
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

    def observe(self, num_sequences: int, began_s: float, ended_s: float, num_tokens: int) -> None:
        """A sequence got tokens at `ended_s`, and its ones before at `began_s`. num_sequences: that are
        running."""
        trial = self._trials.setdefault(num_sequences.bit_length(), _Trial())
        if began_s >= self._since_s and not self._is_exploring:
            trial.turns[self.way].add(ended_s - began_s, num_tokens)
        self._is_exploring = False
        self._tokens_left -= num_tokens
        if self._tokens_left <= 0:
            was = self.way
            self.way = trial.next_way(was)
            self._num_to_explore = EXPLORED if self.way is Way.WIDE is not trial.best else 0
            self._tokens_left = TURN * num_sequences
            if self.way != was:
                self._since_s = ended_s
