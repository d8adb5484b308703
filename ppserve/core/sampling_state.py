"""The sampling state: how long draws travel. It is sent once, when a sequence first draws in an epoch.

A `Draw` may hold a thousand biases and the sequence's whole history. Such draws are left out of plans. The first
one of a sequence goes to the last stage alone, in a `SamplingUpdate`. That stage puts it back into each later
plan, with the tokens that it has seen in slices since. Both sides see the same plans in the same order, and each
epoch begins anew.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace

from ppserve.core.plan import Draw, Slice, StepPlan


@dataclass(frozen=True, slots=True)
class SamplingUpdate:
    """What the last stage is told with a plan."""

    first_draws: tuple[tuple[int, Draw], ...] = ()
    """By place of a slice in the plan: the first draw of its sequence."""
    later: tuple[int, ...] = ()
    """Places of slices that draw as before."""
    ended: tuple[int, ...] = ()
    """Ids of sequences that draw no more."""


NO_UPDATE = SamplingUpdate()


class SamplingEncoder:
    """The head's side, for one epoch."""

    def __init__(self) -> None:
        self._sent: set[int] = set()

    def encode(self, plan: StepPlan, running: Set[int]) -> tuple[StepPlan, SamplingUpdate]:
        """The plan without its long draws, and what goes to the last stage. running: ids of sequences that may
        draw again."""
        ended = self._sent - running
        self._sent -= ended
        first_draws, later, slices = list[tuple[int, Draw]](), list[int](), list(plan.slices)
        for place, s in enumerate(plan.slices):
            if s.draw is None or not s.draw.is_long:
                continue
            if s.sequence_id in self._sent:
                later.append(place)
            else:
                first_draws.append((place, s.draw))
                self._sent.add(s.sequence_id)
            slices[place] = replace(s, draw=None)
        if not (first_draws or later or ended):
            return plan, NO_UPDATE
        update = SamplingUpdate(tuple(first_draws), tuple(later), tuple(ended))
        return replace(plan, slices=tuple(slices)), update


class SamplingDecoder:
    """The last stage's side, for one epoch."""

    def __init__(self) -> None:
        self._draws: dict[int, Draw] = {}
        # Of sequences whose draws depend on their history: all tokens, draft tokens included.
        self._tokens: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._draws)

    def decode(self, plan: StepPlan, update: SamplingUpdate) -> StepPlan:
        """The plan with all its draws. To be called for every plan, in order."""
        for key in update.ended:
            self._draws.pop(key, None)
            self._tokens.pop(key, None)
        for place, draw in update.first_draws:
            key = plan.slices[place].sequence_id
            self._draws[key] = replace(draw, output_ids=())
            if draw.params.needs_history:
                self._tokens[key] = [*draw.prompt_ids, *draw.output_ids]
        drawing = {place for place, _ in update.first_draws}.union(update.later)
        if not drawing:
            return plan
        slices = (self._complete(s) if place in drawing else s for place, s in enumerate(plan.slices))
        return replace(plan, slices=tuple(slices))

    def _complete(self, s: Slice) -> Slice:
        """With the tokens before its draw: those that it sent before, and its own without draft tokens."""
        draw = self._draws[s.sequence_id]
        if (tokens := self._tokens.get(s.sequence_id)) is not None:
            tokens[s.start :] = s.token_ids
            known = s.end - s.num_draft_tokens
            draw = replace(draw, output_ids=tuple(tokens[len(draw.prompt_ids) : known]))
        return replace(s, draw=draw)
