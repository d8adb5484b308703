"""The scheduler: which tokens of which sequences go into the next step.

Each replica has one, on the head. It does no I/O and reads no clock. The request queue, which all replicas share,
gives requests to it; the scheduler owns their sequences while they run. The queue calls it, and it returns events.

Laws
- A generated token is scheduled after it has returned to the head. There are two exceptions. A draft token is a
  guess: what was computed from a wrong one is dropped, and the right token's step overwrites its keys and values.
  And where one rank computes all of the model, its next step is sent ahead, before its tokens are drawn
  (`sent_ahead`).
- Stages run steps in order. So a prompt's next chunk may be scheduled while the one before is in flight, a block
  may be shared once the step that fills it is scheduled, and a freed block may be reused at once.
- The most blocks that a request can need are reserved at admission, so no sequence waits for a block.
- When a stage is lost, all sequences of its replica go back to the queue with their tokens, and are computed
  again.
- Every running sequence ends in `Scheduler.end`, whatever ended it. The event that this returns is its only
  terminal one.

The engine calls `RequestQueue.admit`. Then the replica calls `RequestQueue.schedule` until it returns None, and
enters each plan in the book of steps. It calls `RequestQueue.commit` for results of steps in the book, and
`RequestQueue.give_back` for a lost stage.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ppserve.core.cost_model import StageCost
from ppserve.core.plan import Drawn, Scored, Slice, StepPlan, StepResult
from ppserve.core.request import Request
from ppserve.core.scheduling.block_manager import BlockManager, BlockTable, PrefixCache, worst_case_blocks
from ppserve.core.scheduling.composer import Composer, Pick
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.sent_ahead import StepsAhead
from ppserve.core.scheduling.sequence import EndCause, Sequence, SequenceEvent, SequenceGroup
from ppserve.core.scheduling.slots import MicrobatchSlots, OwnedSlice
from ppserve.core.scheduling.speculation import PromptLookup, Speculation
from ppserve.errors import RequestError, RequestFailed

DRAFT_OUTCOMES = ("accepted", "rejected")
"""A draft token equals the drawn token, or does not."""


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """What became of a step whose result was committed."""

    num_tokens: int
    """Tokens that the step computed. Draft tokens count only if they were accepted."""
    events: list[SequenceEvent]


@dataclass(frozen=True, slots=True)
class GivenBack:
    """The requests of a replica that has closed."""

    groups: tuple[SequenceGroup, ...]
    """They are in the order of their admission here. None of their sequences is running any more."""
    in_flight: frozenset[str]
    """The ids of the requests that were in a step whose result had not returned."""


class Scheduler:
    """The scheduler of one replica."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        costs: Seq[StageCost] = (),
        new_drafter: Callable[[Sequence], PromptLookup] = PromptLookup,
    ) -> None:
        self.config = config
        self.slots = MicrobatchSlots(config.microbatches or config.num_stages)
        self.num_draft_tokens = dict.fromkeys(DRAFT_OUTCOMES, 0)
        """How many returned, of all schedulers that this replica has had. No number ever decreases."""
        self.is_open = True
        self.num_releases = 0
        """How often sequences or blocks were released, or the scheduler opened. A request that did not fit before
        may fit then."""
        self._groups: dict[str, SequenceGroup] = {}  # requests with a running sequence, by id
        self._running: dict[int, Sequence] = {}  # in order of admission
        # Those with known tokens that are in no step yet. The first was admitted, or got its latest token, first.
        self._ready: dict[int, Sequence] = {}
        self._blocks = blocks
        self._prefix_cache = PrefixCache(blocks, config.prefix_cache, config.per_caller)
        self._composer = Composer(config.prefill_chunk, config.max_auto_chunk, costs)
        self._speculation = Speculation(config, costs, new_drafter)
        self.ahead = StepsAhead(config, self.slots, self._prefix_cache, self._speculation)

    # Steps

    def schedule(self, lone: str | None = None, others_wait: bool = False) -> StepPlan | None:
        """Return the next step; None when the pipeline is full or nothing is ready.

        lone: the id of the only request that may be computed now; None = all may. others_wait: whether there are
        requests that no replica computes.
        """
        if self.slots.are_full:
            return None if self._ready or lone is not None else self.ahead.schedule(self._running, others_wait)
        if self.slots.is_unproven and self._running:
            return None if self.is_busy else self._build([])  # a probe
        picks = self._compose(lone)
        return self._build(picks) if picks else None

    def take_masks(self) -> list[SequenceEvent]:
        """Look up the masks that the next steps need, also those of draft tokens. A sequence whose masks are not
        all there stays out of steps until they are. Ends the requests in whose answers no token may follow."""
        events: list[SequenceEvent] = []
        may_draft = self._speculation.may_draft(len(self._running))
        for sequence in [s for s in self._ready.values() if s.awaits_mask]:
            if not sequence.is_live:
                continue  # its request has just ended
            try:
                is_there = sequence.find_mask()
            except RequestError as error:
                events += self._end_request(sequence.request.id, error)
                continue
            if is_there and may_draft and sequence.num_pending == 1:
                is_there = self._speculation.draft(sequence, self._running) is not None
            sequence.note_masks(is_there)
        for sequence in self.ahead.filtered:
            try:
                sequence.find_mask()
            except RequestError as error:
                events += self._end_request(sequence.request.id, error)
        return events

    def _compose(self, lone: str | None) -> list[Pick]:
        if lone is None:
            self._share_beginnings()
            ready = self._ready.values()
            picks = self._composer.compose(ready, self.num_running, self.slots.num_slots)
            return self._speculation.add_drafts(picks, self._running)
        if self.slots.hold_others_than(lone):
            return []
        alone = [s for s in self._ready.values() if s.request.id == lone]
        return self._composer.compose(alone, len(alone), 1)

    def _share_beginnings(self) -> None:
        """Let sequences that have not begun share blocks that others fill: requests that were admitted together,
        as after a loss, compute a common prefix only once."""
        for sequence in self._ready.values():
            if sequence.scheduled > 0 or not sequence.is_ready:
                continue
            shared = self._prefix_cache.find(sequence)
            table = self._blocks.share_beginning(sequence.id, shared) if shared else None
            if table is not None:
                sequence.use_blocks(table, len(shared))
                self.num_releases += 1

    def _build(self, picks: list[Pick]) -> StepPlan:
        owned = tuple(OwnedSlice(s, s.schedule(num_tokens, draft_ids)) for s, num_tokens, draft_ids in picks)
        for sequence, _ in owned:
            self._prefix_cache.offer(sequence)
            if sequence.num_pending == 0:
                del self._ready[sequence.id]
        return self.slots.add_step(owned)

    def commit(self, result: StepResult) -> CommittedStep | None:
        """Apply the last stage's result of a step. Return None if the step is unknown or of an older epoch."""
        if result.epoch == self.slots.epoch:
            self.ahead.note_returned(result.step_id)
        owned = self.slots.remove_step(result)
        if owned is None:
            return None
        drawn: dict[int | None, list[Drawn]] = defaultdict(list)
        for one in result.drawn:
            drawn[one.sequence_id].append(one)
        scored = {one.sequence_id: one for one in result.scored}
        events: list[SequenceEvent] = []
        num_tokens = 0
        for sequence, slice_ in owned:
            num_tokens += slice_.num_tokens - slice_.num_draft_tokens
            if sequence.is_live:
                num_before = len(sequence.token_ids)
                events += self._apply(sequence, slice_, drawn[sequence.id], scored.get(sequence.id))
                num_tokens += self._count_drafts(slice_, len(sequence.token_ids) - num_before)
        return CommittedStep(num_tokens, events)

    def _count_drafts(self, slice_: Slice, num_new: int) -> int:
        """Count the draft tokens of a slice that brought `num_new` tokens. Return how many were accepted."""
        num_accepted = min(max(0, num_new - 1), slice_.num_draft_tokens)
        self.num_draft_tokens["accepted"] += num_accepted
        self.num_draft_tokens["rejected"] += slice_.num_draft_tokens - num_accepted
        return num_accepted

    def _apply(
        self, sequence: Sequence, slice_: Slice, drawn: list[Drawn], scored: Scored | None
    ) -> Iterator[SequenceEvent]:
        scores = scored.logprobs if scored else ()
        are_finite = all(math.isfinite(score.logprob) for score in scores)
        if len(scores) != len(slice_.targets) or not are_finite:
            yield from self._fail_non_finite(sequence.request.id)
            return
        sequence.commit_slice(slice_, scores)
        if slice_.draw is None and sequence.known_end and sequence.computed == len(sequence.token_ids):
            yield self.end(sequence, sequence.known_end)
            return
        for row in range(slice_.num_draws):
            if row and not sequence.accept_draft(slice_.token_ids[row - slice_.num_draws]):
                break
            if row >= len(drawn) or drawn[row].token_id is None:
                yield from self._fail_non_finite(sequence.request.id)
                return
            event = self._commit_token(sequence, drawn[row])
            yield event
            if event.is_terminal:
                return
        if slice_.draw is not None and sequence.num_pending:
            self._ready[sequence.id] = sequence

    def _commit_token(self, sequence: Sequence, drawn: Drawn) -> SequenceEvent:
        assert drawn.token_id is not None
        finish = sequence.commit_token(drawn.token_id)
        if finish is not None:
            return self.end(sequence, finish, drawn)
        return self._groups[sequence.request.id].token_event(sequence, drawn)

    def _fail_non_finite(self, request_id: str) -> list[SequenceEvent]:
        """End a request whose logits were not finite."""
        # The keys and values of its sequences may not be finite either: never share their blocks.
        for sequence in self._groups[request_id].live:
            self._blocks.forget_contents_of(sequence.id)
        return self._end_request(request_id, RequestFailed("the model's output is not finite"))

    def _end_request(self, request_id: str, error: RequestError) -> list[SequenceEvent]:
        return [self.end(sequence, error) for sequence in self._groups[request_id].live]

    def end(self, sequence: Sequence, cause: EndCause, drawn: Drawn | None = None) -> SequenceEvent:
        """End a running sequence, and return its only terminal event. Every running sequence ends here. Steps in
        flight may still compute the sequence and write its blocks. drawn: its last token, if that ends it."""
        group = self._groups[sequence.request.id]
        event = group.end(sequence, cause, drawn)
        self._remove(sequence)
        self.ahead.cancel_unused()
        self.num_releases += 1
        if not group.live:
            del self._groups[group.key]
        return event

    # Requests

    @property
    def may_admit(self) -> bool:
        """Whether there may be room for a request."""
        has_place = len(self._running) < self.config.max_num_seqs
        return self.is_open and has_place and self._blocks.num_free > 0

    def tokens_left_with(self, group: SequenceGroup) -> int | None:
        """Return the tokens that this replica has left to compute if it admits a request; None: it has no room. Of
        the request count the known tokens that are not cached here."""
        live = group.live
        if len(self._running) + len(live) > self.config.max_num_seqs:
            return None
        num_prompt = len(group.request.prompt_ids)
        block_size = self.config.block_size
        cached = self._prefix_cache.find(live[0])
        needed = worst_case_blocks(num_prompt, live[0].max_positions, len(live), block_size)
        if not self._blocks.fits(needed - len(cached), cached):
            return None
        num_new = sum(len(s.token_ids) for s in live) - len(cached) * block_size
        return self.tokens_left + num_new

    def admit(self, group: SequenceGroup) -> None:
        """Start a request for which `tokens_left_with` found room."""
        self.ahead.cancel_unneeded()
        self._groups[group.key] = group
        leader, *siblings = group.live
        block_size = self.config.block_size
        cached = self._prefix_cache.find(leader)
        cached_tokens = len(cached) * block_size
        self._start(leader, cached, cached_tokens)
        num_shared = (len(group.request.prompt_ids) - 1) // block_size
        for sibling in siblings:
            self._start(sibling, leader.block_table[:num_shared], cached_tokens, leader)

    def _start(
        self, sequence: Sequence, shared: BlockTable, cached_tokens: int, leader: Sequence | None = None
    ) -> None:
        num_blocks = self._blocks.blocks_for(sequence.max_positions)
        table = self._blocks.try_allocate(sequence.id, num_blocks, shared)
        assert table is not None, "the fit was checked"
        sequence.start(cached_tokens)
        sequence.use_blocks(table, len(shared), leader)
        self._running[sequence.id] = self._ready[sequence.id] = sequence

    def _remove(self, sequence: Sequence) -> None:
        del self._running[sequence.id]
        self._ready.pop(sequence.id, None)
        self._blocks.release(sequence.id)

    def give_back(self) -> GivenBack:
        """Close, and return all requests: they will be computed again, here or on another replica."""
        self.is_open = False
        in_flight = self.slots.lose()
        self.ahead.lose()
        self._blocks.forget_contents()
        for sequence in list(self._running.values()):
            self._remove(sequence)
            sequence.give_back()
        groups = tuple(self._groups.values())
        self._groups.clear()
        return GivenBack(groups, in_flight)

    def continue_after(self, earlier: Scheduler) -> None:
        """Take the place of a scheduler that has closed: steps are numbered, and draft tokens counted, from where
        it ended."""
        self.slots.continue_after(earlier.slots)
        self.num_draft_tokens = earlier.num_draft_tokens

    def open(self, epoch: int) -> None:
        """Open for an epoch that has formed: requests may be admitted."""
        self.slots.begin_epoch(epoch)
        self.is_open = True
        self.num_releases += 1

    # State

    def request_of(self, sequence_id: int) -> Request | None:
        """Return the request of a running sequence; None if the sequence has ended."""
        sequence = self._running.get(sequence_id)
        return None if sequence is None else sequence.request

    @property
    def num_running(self) -> int:
        """The number of admitted sequences that have not ended."""
        return len(self._running)

    @property
    def tokens_left(self) -> int:
        """Tokens to compute until all running sequences have answers of their greatest length."""
        return sum(s.max_positions - s.computed for s in self._running.values())

    @property
    def num_blocks(self) -> int:
        return self._blocks.num_blocks

    @property
    def kv_usage(self) -> float:
        """The share of KV blocks that sequences hold, 0 to 1."""
        return self._blocks.num_held / self._blocks.num_blocks

    @property
    def is_busy(self) -> bool:
        """Whether steps are in flight."""
        return len(self.slots) > 0
