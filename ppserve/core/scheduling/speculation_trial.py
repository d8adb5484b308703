"""Which draft tokens pay, by measurement: the ways of running take turns, and the fastest gets nearly all the
turns.

The cost model cannot know everything that a draft token costs: stages that share cores, memory or Python's lock
slow each other down, so that a step on a draft token is not free although it fills a gap. So what counts is the
time from token to token of the running sequences.

Other numbers of sequences are other trials. Their number may change at any moment. Then a turn begins anew, by the
way that was best for the new number: what was seen of the old turn says nothing of a whole one.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from ppserve.core.scheduling.trial import Trial

# Tokens in a turn.
TURN = 16
# By which a way with draft tokens must be faster than the one without.
MARGIN = 1.04


class Way(IntEnum):
    """PLAIN: no draft tokens. WIDE: as further rows in steps of known tokens. DEEP: in steps of their own as
    well."""

    PLAIN = 0
    WIDE = 1
    DEEP = 2


class SpeculationTrial:
    """way: of running now. trying_width: called when a lone sequence's turn of trying WIDE
    begins."""

    def __init__(self, trying_width: Callable[[], object] = lambda: None) -> None:
        self.way = Way.PLAIN
        self._trying_width = trying_width
        self._trials: dict[int, Trial] = {}
        self._load = 0  # the class of the number of sequences
        self._since_s = 0.0
        self._has_guessed = False
        self._tokens_left = TURN

    def drafted(self) -> None:
        """A step takes draft tokens."""
        self._has_guessed = True

    def observe(self, num_sequences: int, began_s: float, ended_s: float, num_tokens: int) -> None:
        """A sequence got tokens at `ended_s`, and its ones before at `began_s`. num_sequences: that are
        running."""
        num_sequences = max(1, num_sequences)  # the last token of the last answer
        load = num_sequences.bit_length()
        trial = self._trials.get(load)
        if trial is None:  # no `setdefault`: every token comes by here
            trial = self._trials[load] = Trial(tuple(Way), MARGIN)
        if load != self._load:
            self._load = load
            trial.forget_turn()
            self._since_s = ended_s
            self._begin_turn(Way(trial.best), num_sequences, ended_s)
            return
        if began_s >= self._since_s:
            trial.add(ended_s - began_s, num_tokens)
        self._tokens_left -= num_tokens
        if self._tokens_left <= 0 or trial.has_lost(self.way, TURN * num_sequences):
            self._begin_turn(Way(trial.next_way(self.way, self._has_guessed)), num_sequences, ended_s)
            if self.way is Way.WIDE and trial.best != Way.WIDE and num_sequences == 1:
                self._trying_width()

    def _begin_turn(self, way: Way, num_sequences: int, now_s: float) -> None:
        if way != self.way:
            self.way, self._since_s = way, now_s
        self._has_guessed, self._tokens_left = False, TURN * num_sequences
