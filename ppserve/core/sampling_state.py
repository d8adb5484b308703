"""The sampling state: how long draws travel. It is sent once, when a sequence first draws in an epoch.

A `Draw` may hold a thousand biases and the sequence's whole history. In plans KEPT stands in place of such draws.
The first one of a sequence goes beside the plan, in a `SamplingUpdate`. The last stage puts it back into each
later plan, with the tokens that it has seen in slices since. Both sides see the same plans in the same order, and
each epoch begins anew.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace

from ppserve.core.plan import Draw, Slice, StepPlan
from ppserve.core.request import SamplingParams

KEPT = Draw(SamplingParams(temperature=-1.0))
"""The draw that the last stage keeps for the sequence. No request has a temperature below 0."""


@dataclass(frozen=True, slots=True)
class SamplingUpdate:
    """What the last stage is told with a plan."""

    first_draws: tuple[tuple[int, Draw], ...] = ()
    """The first draws of sequences, by the sequence's id."""
    ended: tuple[int, ...] = ()
    """Ids of sequences that draw no more."""


class SamplingEncoder:
    """The head's side, for one epoch."""

    def __init__(self) -> None:
        self._sent: set[int] = set()

    def encode(self, plan: StepPlan, running: Set[int]) -> tuple[StepPlan, SamplingUpdate]:
        """The plan without its long draws, and what the last stage needs beside it. running: ids of sequences
        that may draw again."""
        ended = self._sent - running
        long = {s.sequence_id: s.draw for s in plan.slices if s.draw is not None and s.draw.is_long}
        first_draws = tuple((key, draw) for key, draw in long.items() if key not in self._sent)
        self._sent = (self._sent - ended).union(long)
        if long:
            slices = (replace(s, draw=KEPT) if s.draw and s.sequence_id in long else s for s in plan.slices)
            plan = replace(plan, slices=tuple(slices))
        return plan, SamplingUpdate(first_draws, tuple(ended))


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
        for key, draw in update.first_draws:
            self._draws[key] = replace(draw, output_ids=())
            if draw.params.needs_history:
                self._tokens[key] = [*draw.prompt_ids, *draw.output_ids]
        kept = [s.draw is not None and s.draw.params.temperature < 0 for s in plan.slices]
        if not any(kept):
            return plan
        slices = (self._complete(s) if is_kept else s for s, is_kept in zip(plan.slices, kept, strict=True))
        return replace(plan, slices=tuple(slices))

    def _complete(self, s: Slice) -> Slice:
        """Complete a slice with the tokens before its draw: those that it sent before, and its own without draft
        tokens."""
        draw = self._draws[s.sequence_id]
        if (tokens := self._tokens.get(s.sequence_id)) is not None:
            tokens[s.start :] = s.token_ids
            known = s.end - s.num_draft_tokens
            draw = replace(draw, output_ids=tuple(tokens[len(draw.prompt_ids) : known]))
        return replace(s, draw=draw)
