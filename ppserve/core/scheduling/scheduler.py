"""The scheduler: which tokens of which sequences go into the next step.

Each replica has one, on the head. It is told all it knows, also the time, and does no I/O. Requests come from the
request queue, which all replicas share.

Laws
- A token is scheduled after it has returned to the head. One exception is a draft token: what was computed from a
  wrong one is dropped, and the right token's step writes its keys and values anew. The other: where one rank
  computes all of the model, its next step is sent ahead, without the tokens (`slots`).
- Stages run steps in order. So a prompt's next chunk may be scheduled while the one before is in flight, a block
  may be shared once the step that fills it is scheduled, and a freed block may be reused at once.
- The most blocks that a request can need are reserved at admission, so no sequence waits for a block.
- When a stage is lost, its sequences go back to the queue with their tokens, and are computed again.
- Every sequence has one terminal event.

The engine calls `RequestQueue.admit`. Then the replica calls `schedule` until it returns None, and enters each
plan in the book of steps. It calls `commit` for results of steps in the book, `give_back` for a lost stage.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, KeysView
from collections.abc import Sequence as Seq

from ppserve.core.cost_model import StageCost
from ppserve.core.plan import Drawn, Scored, Slice, StepPlan, StepResult, TokenLogprobs
from ppserve.core.scheduling.admission import worst_case_blocks
from ppserve.core.scheduling.block_manager import BlockManager, BlockTable, PrefixCache
from ppserve.core.scheduling.composer import Composer, Pick
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.request_queue import RequestQueue
from ppserve.core.scheduling.sequence import Sequence, SequenceEvent, SequenceGroup, SequenceStatus
from ppserve.core.scheduling.slots import MicrobatchSlots
from ppserve.core.scheduling.speculation import PromptLookup, Speculation

OUTCOMES = ("accepted", "rejected")
"""A draft token equals the drawn token, or does not."""


class Scheduler:
    """The scheduler of one replica. `now` is the head's monotonic clock, in seconds."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        costs: Seq[StageCost] = (),
        request_queue: RequestQueue | None = None,
        new_drafter: Callable[[Sequence], PromptLookup] = PromptLookup,
    ) -> None:
        self.config = config
        self.slots = MicrobatchSlots(config.microbatches or config.num_stages)
        self.num_draft_tokens = dict.fromkeys(OUTCOMES, 0)
        self.is_open = True
        self._running: dict[int, Sequence] = {}  # in order of admission
        # Those that have known tokens to schedule: first those that were admitted, or got a token, first.
        self._ready: dict[int, Sequence] = {}
        self._blocks = blocks
        self._prefix_cache = PrefixCache(blocks, config.prefix_cache, config.per_caller)
        self._composer = Composer(config.prefill_chunk, config.max_auto_chunk, costs)
        self._speculation = Speculation(config, costs, new_drafter)
        self.request_queue = RequestQueue() if request_queue is None else request_queue
        self.request_queue.add_scheduler(self)

    # Steps

    def schedule(self, now: float) -> StepPlan | None:
        """The next step; None when the pipeline is full or nothing is ready."""
        if self.slots.are_full:
            return self._schedule_ahead()
        if self.slots.is_unproven and self._running:
            return None if self.is_busy else self._build([], now)  # a probe
        picks = self._compose()
        return self._build(picks, now) if picks else None

    def _compose(self) -> list[Pick]:
        lone = self.request_queue.lone_at(self)
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
        """Requests that were admitted together, as after a loss, compute a common prefix only once."""
        for sequence in self._ready.values():
            if sequence.scheduled > 0 or not sequence.is_ready:
                continue
            shared = self._prefix_cache.find(sequence)
            table = self._blocks.share_beginning(sequence.id, shared) if shared else None
            if table is not None:
                sequence.use_blocks(table, len(shared))
                self.request_queue.retry_admission()

    def _build(self, picks: list[Pick], now: float) -> StepPlan:
        if not self.is_busy:
            self.request_queue.step_scheduled(now)
        owned = tuple((s, s.schedule(num_tokens, draft_ids)) for s, num_tokens, draft_ids in picks)
        for sequence, _ in owned:
            self._prefix_cache.offer(sequence)
            if sequence.remaining == 0:
                del self._ready[sequence.id]
        return self.slots.add_step(owned)

    def commit(self, result: StepResult, now: float) -> list[SequenceEvent]:
        """Apply the last stage's result of a step, unless it is of an older epoch or unknown."""
        owned = self.slots.remove_step(result)
        if owned is None:
            return []
        drawn: dict[int, list[Drawn]] = defaultdict(list)
        for one in result.drawn:
            drawn[one.sequence_id].append(one)
        scored = {one.sequence_id: one for one in result.scored}
        events: list[SequenceEvent] = []
        num_tokens = 0
        for sequence, piece in owned:
            num_tokens += len(piece.token_ids) - piece.num_draft_tokens
            if sequence.is_live:
                num_before = len(sequence.token_ids)
                events += self._apply(sequence, piece, drawn[sequence.id], scored.get(sequence.id))
                num_tokens += self._count_drafts(piece, len(sequence.token_ids) - num_before)
        self.request_queue.step_committed(num_tokens, now)
        return events

    def _count_drafts(self, piece: Slice, num_new: int) -> int:
        """How many draft tokens of a slice that brought `num_new` tokens were right."""
        num_accepted = min(max(0, num_new - 1), piece.num_draft_tokens)
        self.num_draft_tokens["accepted"] += num_accepted
        self.num_draft_tokens["rejected"] += piece.num_draft_tokens - num_accepted
        return num_accepted

    def _apply(
        self, sequence: Sequence, piece: Slice, drawn: list[Drawn], scored: Scored | None
    ) -> Iterator[SequenceEvent]:
        group = self.request_queue.groups[sequence.request.id]
        scores = scored.logprobs if scored else ()
        are_finite = all(math.isfinite(score.logprob) for score in scores)
        if len(scores) != len(piece.targets) or not are_finite:
            yield from self._not_finite(group)
            return
        sequence.commit_slice(piece, scores)
        if piece.draw is None and sequence.known_end and sequence.computed == len(sequence.token_ids):
            yield self.request_queue.end_sequence(sequence, group, finish=sequence.known_end)
            return
        for row in range(piece.num_draws):
            if row and not sequence.accept_draft(piece.token_ids[row - piece.num_draws]):
                break
            token_id = drawn[row].token_id if row < len(drawn) else None
            if token_id is None:
                yield from self._not_finite(group)
                return
            event = self._drawn(sequence, group, token_id, drawn[row].logprobs)
            yield event
            if event.is_terminal:
                return
        if piece.draw is not None and sequence.remaining:
            self._ready[sequence.id] = sequence

    def _not_finite(self, group: SequenceGroup) -> list[SequenceEvent]:
        """The request's end, with all its sequences."""
        # Their KV may hold non-finite values: never share it.
        for sequence in group.live:
            self._blocks.forget_contents_of(sequence.id)
        return self.request_queue.fail_request(group, "the model's output is not finite")

    def _drawn(
        self, sequence: Sequence, group: SequenceGroup, token_id: int, logprobs: TokenLogprobs | None
    ) -> SequenceEvent:
        end = sequence.commit_token(token_id)
        self.request_queue.token_drawn(group)
        event = group.event(sequence, token_id, logprobs, end)
        if end is not None:
            self.request_queue.retire(sequence, group)
        return event

    # Steps that are sent ahead

    def _schedule_ahead(self) -> StepPlan | None:
        """A step with one token of each sequence for which the step in flight draws; see `slots`. None if prompts,
        drafts or a waiting request come next."""
        if not self.config.runs_ahead or self.slots.num_slots > 1 or self.request_queue.lone_at(self):
            return None
        parts = self.slots.only_step
        drawing = [s for s, piece in parts if piece.draw and s.is_live and s.num_free_positions > 0]
        makes_room = self.request_queue.num_waiting > 0 and len(drawing) < len(parts)
        has_drafts = any(piece.num_draft_tokens for _, piece in parts)
        if self._ready or makes_room or has_drafts:
            return None
        if not drawing or any(self._speculation.draft(s, self._running) for s in drawing):
            return None
        owned = tuple((sequence, sequence.schedule_ahead()) for sequence in drawing)
        for sequence in drawing:
            self._prefix_cache.offer(sequence)
        return self.slots.add_step(owned, is_ahead=True)

    def _is_unused(self, sequence: Sequence, piece: Slice) -> bool:
        """Whether a slice that was sent ahead is of an ended sequence, and writes no block that others share."""
        num_shared = sequence.num_published * self.config.block_size
        return not sequence.is_live and piece.start >= num_shared

    def _is_unneeded(self, sequence: Sequence, piece: Slice) -> bool:
        """Whether a slice that was sent ahead is unused, or may be sent later: its token is not drawn yet."""
        if sequence.is_live:
            return piece.start >= len(sequence.token_ids)
        return self._is_unused(sequence, piece)

    # Requests

    @property
    def may_admit(self) -> bool:
        """Whether there may be room for a request."""
        has_place = len(self._running) < self.config.max_num_seqs
        return self.is_open and has_place and self._blocks.num_free > 0

    def tokens_with(self, group: SequenceGroup) -> int | None:
        """Tokens left to compute, with this request's known ones that are not cached; None: no room for it."""
        live = group.live
        if len(self._running) + len(live) > self.config.max_num_seqs:
            return None
        num_prompt = len(group.request.prompt_ids)
        block_size = self.config.block_size
        known = self._prefix_cache.find(live[0])
        needed = worst_case_blocks(num_prompt, live[0].max_positions, len(live), block_size)
        if not self._blocks.fits(needed - len(known), known):
            return None
        num_new = sum(len(s.token_ids) for s in live) - len(known) * block_size
        return self.tokens_left + num_new

    def admit(self, group: SequenceGroup) -> None:
        """Start a request that has room."""
        self.slots.cancel_ahead(self._is_unneeded)
        leader, *siblings = group.live
        block_size = self.config.block_size
        known = self._prefix_cache.find(leader)
        cached_tokens = len(known) * block_size
        self._start(leader, known, cached_tokens)
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

    def drop(self, sequence: Sequence) -> None:
        """End a running sequence. Steps in flight may still write its blocks."""
        sequence.move_to(SequenceStatus.ENDED)
        self._remove(sequence)
        self.slots.cancel_ahead(self._is_unused)
        self.request_queue.retry_admission()

    def _remove(self, sequence: Sequence) -> None:
        del self._running[sequence.id]
        self._ready.pop(sequence.id, None)
        self._blocks.release(sequence.id)

    def give_back(self) -> frozenset[str]:
        """Close, and return all requests to the queue. Returns the ids of those in flight."""
        self.is_open = False
        in_flight = self.slots.lose()
        self._blocks.forget_contents()
        keys = dict.fromkeys(s.request.id for s in self._running.values())
        for sequence in list(self._running.values()):
            self._remove(sequence)
            sequence.give_back()
        self.request_queue.give_back(self.request_queue.groups[key] for key in keys)
        return in_flight

    def open(self, epoch: int) -> None:
        """An epoch has formed: requests may be admitted."""
        self.slots.begin_epoch(epoch)
        self.is_open = True
        self.request_queue.retry_admission()

    # State

    @property
    def num_running(self) -> int:
        """Admitted sequences that have not ended."""
        return len(self._running)

    @property
    def running_ids(self) -> KeysView[int]:
        return self._running.keys()

    @property
    def tokens_left(self) -> int:
        """To compute until all running sequences have their longest answers."""
        return sum(s.max_positions - s.computed for s in self._running.values())

    @property
    def num_blocks(self) -> int:
        return self._blocks.num_blocks

    @property
    def kv_usage(self) -> float:
        """Share of KV blocks held by sequences, 0 to 1."""
        return self._blocks.num_held / self._blocks.num_blocks

    @property
    def is_busy(self) -> bool:
        """Whether steps are in flight."""
        return len(self.slots) > 0
