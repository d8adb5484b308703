"""Whose prompt is computed next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import itemgetter

from ppserve.core.scheduling.sequence import Sequence


def in_turns(filling: Iterable[Sequence], short: int) -> list[Sequence]:
    """First one prompt of each caller, the short ones first, then the second of each, and so on. So however many
    prompts others have, a caller's first one waits for one of each of them at most, and a short one for no long
    one. Prompts of one caller keep their order. short: a prompt with at most so many tokens left."""
    turns: Counter[str] = Counter()
    ranked = []
    for sequence in filling:
        caller = sequence.request.caller
        ranked.append(((turns[caller], sequence.remaining > short), sequence))
        turns[caller] += 1
    return [sequence for _, sequence in sorted(ranked, key=itemgetter(0))]
