"""Who makes room for a caller who has nothing, where others hold every place or every block.

Such a caller would wait until one of the others' answers ends, for seconds. Instead running requests are
preempted: they give up their places and blocks, wait before all that were never admitted, and are computed again.
Their full blocks stay in the prefix cache, so mostly only the last few tokens are.

- A request may preempt others if its caller has no other that was ever admitted. So whoever was preempted cannot
  preempt in turn.
- It preempts requests of the caller who has most of them running; of one who has a single one only if that caller
  will have been served more even after the whole answer. So callers who want the same do not take turns.
- Of one caller's requests, the one that was preempted least often, then the latest admitted. It has to gain
  `MIN_GAIN` tokens before it can be preempted again.
- Of all computed tokens at most one in `1 / MAX_SHARE` is computed again for this. Nobody is charged for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ppserve.core.scheduling.scheduler_protocol import RequestScheduler
from ppserve.core.scheduling.sequence import Sequence, SequenceGroup

MIN_GAIN = 16
MAX_SHARE = 1 / 8
# Tokens that may be computed again at once, after a time without.
MAX_SAVED = 1024.0
# Requests, for one that needs more blocks than one of them has.
MAX_AT_ONCE = 8


class Preemption:
    """Chooses who is preempted. served: what a caller was served so far, in tokens."""

    def __init__(self, served: Callable[[str], float]) -> None:
        self._served = served
        self._allowed = MAX_SAVED

    def computed(self, num_tokens: int) -> None:
        """So many tokens were computed."""
        self._allowed = min(MAX_SAVED, self._allowed + MAX_SHARE * num_tokens)

    def make_room(
        self, waiting: SequenceGroup, scheduler: RequestScheduler, running: list[SequenceGroup]
    ) -> list[SequenceGroup]:
        """Displaces some of `running`, all that `host` computes, so that it has room for `waiting`. Who they are;
        none, where that would not help, or is not needed."""
        victims = self._victims(waiting, scheduler, running)
        for victim in victims:
            self._allowed -= scheduler.preempt(victim)
            victim.num_preempted += 1
        return victims

    def _victims(
        self, waiting: SequenceGroup, scheduler: RequestScheduler, groups: list[SequenceGroup]
    ) -> list[SequenceGroup]:
        num_running = Counter(group.caller for group in groups)
        most_served = self._served(waiting.caller) + waiting.num_tokens

        def makes_room(victims: list[SequenceGroup]) -> bool:
            return scheduler.room_for(waiting, [s for victim in victims for s in victim.live]) is not None

        def has_too_much(caller: str) -> bool:
            return num_running[caller] > 1 or self._served(caller) > most_served

        if self._allowed <= 0 or not any(map(has_too_much, num_running)) or makes_room([]):
            return []

        def rank(group: SequenceGroup) -> tuple[float, ...]:
            admitted_s = group.admitted_s or 0.0
            return (num_running[group.caller], self._served(group.caller), -group.num_preempted, admitted_s)

        able = [g for g in groups if g.priority <= waiting.priority and all(map(_is_ready, g.live))]
        chosen: list[SequenceGroup] = []
        while len(chosen) < MAX_AT_ONCE:
            able = [group for group in able if has_too_much(group.caller)]
            if not able:
                return []
            chosen.append(max(able, key=rank))
            if makes_room(chosen):
                return chosen
            able.remove(chosen[-1])
            num_running[chosen[-1].caller] -= 1
        return []


def _is_ready(sequence: Sequence) -> bool:
    """Whether its blocks may be taken: no step in flight writes them, and it has MIN_GAIN tokens more than when
    they last were."""
    gained = len(sequence.token_ids) - sequence.loss_mark
    return (
        not sequence.steps_in_flight
        and not sequence.draft_tokens
        and (not sequence.loss_mark or gained >= MIN_GAIN)
    )
