"""Draft tokens by a draft model: a smaller one with the same vocabulary, which computes elsewhere
(`DraftChannel`).

It draws with the request's own parameters, seed and index. Where it agrees with the model about the likely tokens,
it then mostly draws the same one, also at a high temperature.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from ppserve.core.plan import Draw, Slice
from ppserve.core.request import Request
from ppserve.core.scheduling.drafter import Drafter, DraftToken

NUM_SLOTS = 4
"""Answers whose keys and values the draft model keeps."""

# Questions with more new tokens than this, such as prompts, are not waited for, nor is an answer's first.
MOST_WAITED_FOR = 32
# Tokens in one answer of the draft model.
MOST_DRAFTED = 8
# The probability that a draft token is right, before there is experience.
PRIOR = 0.7
# No more tokens are asked for than are all right with this probability.
LEAST_CHAIN = 0.1
# Where draft tokens are right with less than this probability, the answer is not drafted any more.
LEAST = 0.15
_NEWEST = 1 / 16


class DraftChannel(Protocol):
    """Leads to the draft model. It answers one question after another, in order."""

    @property
    def max_positions(self) -> int:
        """Of its context; 0 while it cannot be asked."""
        ...

    def ask(self, piece: Slice, count: int) -> None:
        """Asks for `count` tokens after those of the slice. The slice's sequence_id is a slot, below NUM_SLOTS;
        what the slot holds before the slice's start is kept. Only when there is no open question."""
        ...

    def answer(self, *, wait: bool) -> tuple[int, ...] | None:
        """The answer to the open question, once; None if it has not come. wait: for a moment. Raises Interrupted
        if a request arrives meanwhile; then fewer tokens may be answered, at least one."""
        ...


@dataclass(slots=True)
class _Slot:
    """owner: whose keys and values are in it; a dead reference once that answer has ended. held: their tokens."""

    owner: weakref.ref[ModelDrafter]
    held: list[int]


class DraftModel:
    """Keeps the books of the draft model's slots, and asks it. Used by one thread."""

    def __init__(self, channel: DraftChannel) -> None:
        self._channel = channel
        self._slots: dict[int, _Slot] = {}
        self._open: tuple[weakref.ref[ModelDrafter], int, int] | None = None

    def drafter(self, request: Request, index: int) -> Drafter:
        """A `NewDrafter`."""
        return ModelDrafter(self, request, index)

    @property
    def max_positions(self) -> int:
        return self._channel.max_positions

    def draft(self, drafter: ModelDrafter, token_ids: list[int], draw: Draw, count: int) -> None:
        """Asks for `count` tokens after these; the drafter is told of them, now or in a later call, or never."""
        if self._open is not None and not self._close(wait=False):
            return
        if (number := self._slot_of(drafter)) is None:
            return
        slot = self._slots[number]
        start = min(_num_common(slot.held, token_ids), len(token_ids) - 1)
        is_new = not slot.held
        self._channel.ask(Slice(number, start, tuple(token_ids[start:]), (), draw), count)
        slot.held = token_ids
        self._open = weakref.ref(drafter), drafter.num_wrong, len(token_ids)
        # An answer's first question is asked in the turn that has its first token, which would wait as well.
        self._close(wait=not is_new and len(token_ids) - start <= MOST_WAITED_FOR)

    def give_up(self, drafter: ModelDrafter) -> None:
        """Others may have the drafter's slot."""
        self._slots = {number: slot for number, slot in self._slots.items() if slot.owner() is not drafter}

    def _close(self, *, wait: bool) -> bool:
        """Whether the open question was answered."""
        assert self._open is not None
        drafted = self._channel.answer(wait=wait)
        if drafted is None:
            return False
        owner, num_wrong, place = self._open
        self._open = None
        if (drafter := owner()) is not None and drafter.num_wrong == num_wrong:
            drafter.told(place, drafted)
            for slot in self._slots.values():
                if slot.owner() is drafter and len(slot.held) == place:
                    slot.held = [*slot.held, *drafted[:-1]]
        return True

    def _slot_of(self, drafter: ModelDrafter) -> int | None:
        """The drafter's slot, or one that is free."""
        free = None
        for number in range(NUM_SLOTS):
            slot = self._slots.get(number)
            owner = None if slot is None else slot.owner()
            if owner is drafter:
                return number
            if owner is None and free is None:
                free = number
        if free is not None:
            self._slots[free] = _Slot(weakref.ref(drafter), [])
        return free


class ModelDrafter:
    """Of one answer. num_wrong: how many of its draft tokens were wrong."""

    def __init__(self, model: DraftModel, request: Request, index: int) -> None:
        self.num_wrong = 0
        self._model = model
        self._request = request
        self._draw = Draw(request.sampling, index)
        self._said: dict[int, int] = {}  # by position
        self._hit_rate = PRIOR
        self._num_known = 0

    def draft_token(self, token_ids: Seq[int], draft_tokens: Seq[int]) -> DraftToken | None:
        self._learn(token_ids)
        place = len(token_ids) + len(draft_tokens)
        if place not in self._said:
            if self._hit_rate < LEAST:
                self._model.give_up(self)
                return None
            count = min(self._num_wanted() - len(draft_tokens), self._model.max_positions - place)
            if count <= 0:
                return None
            assumed = [*token_ids, *draft_tokens]
            self._model.draft(self, assumed, self._draw_after(assumed), count)
            self._learn(token_ids)  # what is said may be older than the last tokens
        if place not in self._said:
            return None
        return DraftToken(self._said[place], self._hit_rate)

    def told(self, place: int, token_ids: Seq[int]) -> None:
        """The model draws these from position `place` on, if nothing that was known or drafted when it was asked
        proves wrong."""
        self._said.update(enumerate(token_ids, place))
        self._num_known = min(self._num_known, place)

    def _learn(self, token_ids: Seq[int]) -> None:
        for place in range(self._num_known, len(token_ids)):
            if (said := self._said.pop(place, None)) is None:
                continue
            right = said == token_ids[place]
            self._hit_rate += (right - self._hit_rate) * _NEWEST
            if not right:
                self._said.clear()
                self.num_wrong += 1
        self._num_known = len(token_ids)

    def _num_wanted(self) -> int:
        """As many as are likely enough to be right."""
        if self._hit_rate >= 1:
            return MOST_DRAFTED
        return min(MOST_DRAFTED, max(1, int(math.log(LEAST_CHAIN) / math.log(self._hit_rate))))

    def _draw_after(self, token_ids: list[int]) -> Draw:
        if not self._request.sampling.needs_history:
            return self._draw
        first = len(self._request.prompt_ids)
        return Draw(
            self._request.sampling,
            self._draw.index,
            prompt_ids=self._request.prompt_ids,
            output_ids=tuple(token_ids[first:]),
        )


def _num_common(held: list[int], token_ids: list[int]) -> int:
    """How many tokens both begin with. They mostly differ near the end of `held`, if at all."""
    count = min(len(held), len(token_ids))
    while held[:count] != token_ids[:count]:
        count -= 1
    return count
