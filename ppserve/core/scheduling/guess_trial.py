"""Whether guesses pay, by measurement: both ways of running take turns, and the faster one gets nearly all the
turns.

The cost model cannot know everything that a guess costs: stages that share cores, or Python's lock, take time from
each other also where a step on a guess fills a gap. So what counts is the time from token to token of the running
sequences, with guesses and without. Other numbers of sequences are other trials.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

# Tokens in a turn.
TURN = 16
# The middle one of so many turns counts, so that one stall (a kernel that is loaded at its first use) decides
# nothing.
REMEMBERED = 3
# The slower way gets one turn in so many; twice as many each time that it is slower again.
FIRST_PROBE, LAST_PROBE = 8, 128
# Guesses must be faster by this factor.
MARGIN = 1.02


class _Way:
    """One way of running: seconds per token in its latest turns."""

    def __init__(self) -> None:
        self._turns: deque[float] = deque(maxlen=REMEMBERED)
        self._seconds, self._tokens = 0.0, 0

    @property
    def pace(self) -> float | None:
        return median_low(self._turns) if self._turns else None

    def add(self, seconds: float, tokens: int) -> None:
        self._seconds += seconds
        self._tokens += tokens

    def end_turn(self) -> None:
        if self._tokens:
            self._turns.append(self._seconds / self._tokens)
        self._seconds, self._tokens = 0.0, 0


class _Trial:
    """Of one number of sequences. ways: without guesses, with guesses."""

    def __init__(self) -> None:
        self.ways = (_Way(), _Way())
        self._guesses_pay = False
        self._probe_in = self._interval = FIRST_PROBE

    def next_way(self, ended: bool) -> bool:
        """Whether the next turn has guesses. ended: whether the last one had."""
        self.ways[ended].end_turn()
        plain, guessing = (way.pace for way in self.ways)
        if plain is None or guessing is None:
            return plain is not None
        pay = guessing * MARGIN < plain
        if pay != self._guesses_pay:
            self._guesses_pay = pay
            self._probe_in = self._interval = FIRST_PROBE
        elif ended != pay:  # a probe, which was slower again
            self._probe_in = self._interval = min(2 * self._interval, LAST_PROBE)
        else:
            self._probe_in -= 1
        return pay if self._probe_in else not pay


class GuessTrial:
    """guessing: whether guesses are made now."""

    def __init__(self) -> None:
        self.guessing = False
        self._trials: dict[int, _Trial] = {}
        self._since_s = 0.0
        self._tokens_left = TURN

    def observe(self, num_sequences: int, began_s: float, ended_s: float, num_tokens: int) -> None:
        """A sequence got tokens at `ended_s`, and its ones before at `began_s`. num_sequences: that are
        running."""
        trial = self._trials.setdefault(num_sequences.bit_length(), _Trial())
        if began_s >= self._since_s:
            trial.ways[self.guessing].add(ended_s - began_s, num_tokens)
        self._tokens_left -= num_tokens
        if self._tokens_left <= 0:
            was = self.guessing
            self.guessing = trial.next_way(was)
            self._tokens_left = TURN * num_sequences
            if self.guessing != was:
                self._since_s = ended_s
