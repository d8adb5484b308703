"""How long draws travel: the last stage is told once in an epoch how a sequence draws, and remembers it.

A `Draw` may hold a thousand biases and the sequence's whole history. Such draws are left out of plans, and what is
`Told` of them goes to the last stage alone. That stage puts them back; the tokens before a draw it knows from the
first `Draw` and from all slices since. Both sides see the same plans in the same order, each epoch begins anew.

A sequence may leave, gain tokens at another replica, come back, and begin with blocks that others have filled.
Then tokens are missing between what the last stage remembers and the slice, and it is told again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from ppserve.core.plan import Draw, Slice, StepPlan

# Sequences that draw no more are forgotten when there are this many of them, beyond one for each that runs.
_MAX_ENDED = 64


@dataclass(frozen=True, slots=True)
class SamplingUpdate:
    """draws: (place of a slice in the plan, its `Draw` if it is told now, else None). forgotten: ids of sequences
    that draw no more."""

    draws: tuple[tuple[int, Draw | None], ...] = ()
    forgotten: tuple[int, ...] = ()


NOTHING = SamplingUpdate()


class SamplingEncoder:
    """The head's side, for one epoch."""

    def __init__(self) -> None:
        # By sequence: where the known tokens ended that its last stage has seen.
        self._told: dict[int, int] = {}

    def tell(self, plan: StepPlan, running: Collection[int]) -> tuple[StepPlan, SamplingUpdate]:
        """The plan without its long draws, and what the last stage must be told. running: ids of sequences that
        may draw again."""
        places = [place for place, s in enumerate(plan.slices) if s.draw is not None and s.draw.is_long]
        if not places:
            return plan, NOTHING
        told, draws, slices = self._told, list[tuple[int, Draw | None]](), list(plan.slices)
        for place in places:
            s = slices[place]
            # Before a slice of draft tokens was one of known tokens.
            is_told = told.get(s.sequence_id, -1) >= (0 if s.is_draft else s.start)
            draws.append((place, None if is_told else s.draw))
            if not is_told or not s.is_draft:
                told[s.sequence_id] = s.end - s.num_draft_tokens
            slices[place] = replace(s, draw=None)
        forgotten: tuple[int, ...] = ()
        if len(told) > 2 * len(running) + _MAX_ENDED:
            forgotten = tuple(told.keys() - running - {slices[place].sequence_id for place in places})
            for key in forgotten:
                del told[key]
        return replace(plan, slices=tuple(slices)), SamplingUpdate(tuple(draws), forgotten)


class SamplingDecoder:
    """The last stage's side, for one epoch."""

    def __init__(self) -> None:
        self._draws: dict[int, Draw] = {}
        # Of sequences whose draws depend on their history: all tokens, draft tokens included.
        self._tokens: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._draws)

    def restore(self, plan: StepPlan, told: SamplingUpdate) -> StepPlan:
        """The plan with all its draws. To be called for every plan, in order."""
        for key in told.forgotten:
            self._draws.pop(key, None)
            self._tokens.pop(key, None)
        if not self._tokens and not told.draws:
            return plan
        slices = list(plan.slices)
        for place, draw in told.draws:
            s = slices[place]
            if draw is not None:
                self._remember(s, draw)
            slices[place] = replace(s, draw=self._draws[s.sequence_id])
        if self._tokens:
            slices = [self._with_history(s) for s in slices]
        return replace(plan, slices=tuple(slices))

    def _remember(self, s: Slice, draw: Draw) -> None:
        self._draws[s.sequence_id] = replace(draw, output_ids=())
        if draw.params.needs_history:
            self._tokens[s.sequence_id] = [*draw.prompt_ids, *draw.output_ids]

    def _with_history(self, s: Slice) -> Slice:
        """Its tokens follow those that came before; those after the first drawn row are draft tokens."""
        tokens = self._tokens.get(s.sequence_id)
        if tokens is None:
            return s
        tokens[s.start :] = s.token_ids
        if s.draw is None:
            return s
        known = s.end - s.num_draws + 1
        return replace(s, draw=replace(s.draw, output_ids=tuple(tokens[len(s.draw.prompt_ids) : known])))
