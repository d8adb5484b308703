"""The scheduler: which tokens of which sequences go into the next step.

There is one scheduler per pipeline. It runs on the head and is told everything: requests, results, losses and the
time. It reads no clock and does no I/O.

Laws
- A drawn token is scheduled only after it has returned to the head. So no placeholder is sent. A guess may be
  scheduled before, but what was computed from a wrong guess is dropped: nobody sees it, and the right token's step
  writes its keys and values anew.
- Stages run steps in order. Hence a prompt's next chunk may be scheduled while the chunk before is in flight, a
  block may be shared as soon as the step that fills it is scheduled, and a freed block may be reused at once.
- The most blocks that a request can need are reserved at admission; an admitted sequence is never preempted. When
  a stage is lost, every sequence keeps its tokens and its block table and is computed again.
- Every sequence causes exactly one terminal event, except one that the engine ends (`finish`).

The replica calls `expire(now)`, then `schedule(now)` until it returns None, and enters each plan in the book of
steps before it asks for the next. It calls `commit` for every result of the last stage that is in the book.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, KeysView, Set

from ppserve.core.ledger.steps import Steps
from ppserve.core.plan import Drawn, Scored, Slice, StepPlan, StepResult
from ppserve.core.request import FinishReason, Request
from ppserve.core.scheduling.admission import refuse_impossible, refuse_overload, worst_case_blocks
from ppserve.core.scheduling.block_manager import BlockManager
from ppserve.core.scheduling.composer import Composer, CostModel, StepLimits
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.drafter import NewDrafter, look_up_prompts
from ppserve.core.scheduling.fairness import FairQueue
from ppserve.core.scheduling.lanes import Lanes
from ppserve.core.scheduling.prefix_cache import PrefixCache
from ppserve.core.scheduling.quarantine import Quarantine
from ppserve.core.scheduling.roster import Roster
from ppserve.core.scheduling.sequence import Sequence, SequenceEvent, SequenceGroup, SequenceStatus
from ppserve.core.scheduling.speculation import Pick, Speculation
from ppserve.core.scheduling.throughput import Throughput
from ppserve.errors import InvalidRequest, RequestError, RequestFailed, Violation


class Scheduler:
    """See the module. `now` is the head's monotonic clock, in seconds."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        steps: Steps,
        costs: CostModel | None = None,
        epoch: int = 0,
        new_drafter: NewDrafter = look_up_prompts,
    ) -> None:
        if blocks.block_size != config.block_size:
            raise ValueError(f"block_size: {config.block_size} here, {blocks.block_size} in the block manager")
        self.config = config
        self._prefix_cache = PrefixCache(blocks, config.prefix_cache, config.per_caller)
        self._blocks = blocks
        self._composer = Composer(StepLimits(config.prefill_chunk, config.max_auto_chunk), costs)
        self._queue = FairQueue(config.aging_s)
        self._quarantine = Quarantine()
        self._throughput = Throughput()
        self._groups: dict[str, SequenceGroup] = {}
        self._roster = Roster()
        self._ending: dict[int, Sequence] = {}
        self.lanes = Lanes(steps, config, epoch)
        self._speculation = Speculation(config, self.lanes, costs, new_drafter)
        self._next_deadline_s = math.inf  # no open request has an earlier one
        self._queue_may_move = True
        self._next_sequence_id = 0

    # State

    @property
    def num_running(self) -> int:
        """Admitted sequences that have not ended."""
        return len(self._roster)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def running_ids(self) -> KeysView[int]:
        """Ids of the admitted sequences that have not ended."""
        return self._roster.ids

    @property
    def has_work(self) -> bool:
        return bool(self._groups or len(self.lanes))

    @property
    def kv_usage(self) -> float:
        """Share of KV blocks held by sequences, 0 to 1."""
        return self._blocks.num_held / self._blocks.num_blocks

    @property
    def epoch(self) -> int:
        """The current epoch. Plans carry it, and results of older epochs are ignored."""
        return self.lanes.epoch

    @property
    def microbatches(self) -> int:
        return self.lanes.num_lanes

    def set_microbatches(self, microbatches: int) -> None:
        """Change how many steps may be in flight. Steps above the new number finish."""
        if not 1 <= microbatches <= self.config.max_microbatches:
            raise ValueError(f"microbatches: {microbatches} is not within 1 .. {self.config.max_microbatches}")
        self.lanes.num_lanes = microbatches

    # Requests

    def submit(self, request: Request, now: float) -> None:
        """Queue a request. Raises InvalidRequest (it can never run) or Overloaded (it cannot run now)."""
        if request.id in self._groups:
            raise InvalidRequest([Violation("request_id", "is in use by another request")])
        refuse_impossible(request, self.config, self._blocks.num_blocks)
        indices = range(request.num_sequences) if request.resume_index is None else [request.resume_index]
        first_id = self._next_sequence_id
        sequences = [Sequence(first_id + i, request, index, self.config.eos_id) for i, index in enumerate(indices)]
        sequences[0].wants_scores = request.output.prompt_logprobs is not None and not request.resume_ids
        group = SequenceGroup(request, sequences, now)
        self._groups[request.id] = group
        self._queue.push(group)
        self._queue_may_move = True
        self._admit(now)  # first, so that the queue's bounds hold for requests that do wait
        if group.admitted_s is None:
            try:
                refuse_overload(group, self._queue, self._throughput, self.config, now)
            except RequestError:
                self._leave(group)
                raise
        self._next_sequence_id += len(sequences)
        if request.deadline_s is not None:
            self._next_deadline_s = min(self._next_deadline_s, request.deadline_s)

    def abort(self, request_id: str, reason: FinishReason) -> list[SequenceEvent]:
        """End a request now, whatever its state. Nothing happens if it is unknown or has ended."""
        group = self._groups.get(request_id)
        if group is None:
            return []
        return [self._end(s, group, finish=reason) for s in group.live]

    def finish(self, sequence_id: int, reason: FinishReason, now: float) -> None:
        """End a sequence whose end the engine has found (a stop string): no event, no further step."""
        sequence = self._roster.get(sequence_id)
        if sequence is not None:
            self._end(sequence, self._groups[sequence.request.id], finish=reason)

    def expire(self, now: float) -> list[SequenceEvent]:
        """End every request whose deadline has passed."""
        if now < self._next_deadline_s:
            return []
        requests = [g.request for g in self._groups.values()]
        deadlines = sorted((r.deadline_s, r.id) for r in requests if r.deadline_s is not None)
        overdue = [key for deadline_s, key in deadlines if deadline_s <= now]
        self._next_deadline_s = deadlines[len(overdue)][0] if len(overdue) < len(deadlines) else math.inf
        return [event for key in overdue for event in self.abort(key, FinishReason.DEADLINE)]

    def _end(
        self,
        sequence: Sequence,
        group: SequenceGroup,
        *,
        finish: FinishReason | None = None,
        error: RequestError | None = None,
    ) -> SequenceEvent:
        """End a live sequence. Steps in flight may still hold it; see `_retire`."""
        event = sequence.event(finish=finish, error=error, admitted_s=group.admitted_s)
        self._retire(sequence, group)
        return event

    def _retire(self, sequence: Sequence, group: SequenceGroup) -> None:
        if sequence.status is SequenceStatus.WAITING:
            sequence.move_to(SequenceStatus.ENDED)
        else:
            self._roster.remove(sequence)
            self.lanes.drop_guesses(sequence, len(sequence.guesses), len(sequence.token_ids))
            if sequence.steps_in_flight:
                sequence.move_to(SequenceStatus.ENDING)
                self._ending[sequence.id] = sequence
            else:
                self._release(sequence)
        if not group.live:
            self._leave(group)
        self._queue_may_move = True

    def _leave(self, group: SequenceGroup) -> None:
        """All sequences of a request have ended."""
        if group.admitted_s is not None:
            self._throughput.request_ended(group.num_tokens, group.num_known_tokens)
        if group in self._queue:
            self._queue.remove(group)
        self._queue.leave(group.caller)
        self._quarantine.cleared(group.key)
        del self._groups[group.key]

    def _release(self, sequence: Sequence) -> None:
        sequence.move_to(SequenceStatus.ENDED)
        self._blocks.release(sequence.id)
        self._ending.pop(sequence.id, None)
        self._queue_may_move = True

    # Admission

    def _admit(self, now: float) -> None:
        """Admit waiting requests, in the queue's order, until the first that does not fit."""
        while self._queue_may_move and self._quarantine.lone is None:
            group = self._queue.first(now)
            if group is None or not self._try_admit(group, now):
                self._queue_may_move = False

    def _try_admit(self, group: SequenceGroup, now: float) -> bool:
        leader, *siblings = group.sequences
        if len(self._roster) + len(group.sequences) > self.config.max_num_seqs:
            return False
        size, num_prompt = self.config.block_size, len(group.request.prompt_ids)
        known = self._prefix_cache.find(leader)
        needed = worst_case_blocks(num_prompt, leader.max_positions, len(group.sequences), size)
        if not self._blocks.fits(needed - len(known), known):
            return False
        self._queue.remove(group)
        group.admitted_s = now
        self._start(leader, known)
        leader.scheduled = leader.computed = len(known) * size
        leader.num_published = len(known)
        num_shared = (num_prompt - 1) // size
        for sibling in siblings:
            self._start(sibling, leader.block_table[:num_shared])
            sibling.num_published = num_shared
            if (num_prompt - 1) % size:
                sibling.fork_block = leader.block_table[num_shared]
                self._blocks.pin(sibling.id, sibling.fork_block)
        for sequence in group.sequences:
            sequence.cached_tokens = leader.scheduled
        self._roster.admit(leader, siblings)
        self._queue.charge(group.caller, len(leader.token_ids) - leader.scheduled)
        return True

    def _start(self, sequence: Sequence, shared: tuple[int, ...]) -> None:
        table = self._blocks.try_allocate(sequence.id, self._blocks.blocks_for(sequence.max_positions), shared)
        assert table is not None, "the fit was checked"
        sequence.block_table = table
        sequence.move_to(SequenceStatus.RUNNING)

    # Steps

    def schedule(self, now: float) -> StepPlan | None:
        """The next step; None when the pipeline is full or nothing is ready."""
        if self.lanes.full:
            return None
        lone = self._quarantine.lone
        if lone is None:
            self._admit(now)
            self._skip_refilled()
            picks = self._compose()
        else:
            picks = self._compose_alone(lone)
        if picks and not len(self.lanes):
            self._throughput.started(now)
        return self._build(picks) if picks else None

    def _compose(self) -> list[Pick]:
        """Known tokens first; guesses beside them or, where stages would stand idle, alone."""
        roster, speculation = self._roster, self._speculation
        picks = self._composer.compose(roster.returned, roster.num_decoding, roster.filling, self.microbatches)
        if picks:
            return speculation.widen(picks)
        return speculation.deepen(roster.running) if self.lanes.have_gap else []

    def _skip_refilled(self) -> None:
        """After a loss, compute a prefix that several sequences share only once."""
        for sequence in self._roster.filling:
            if sequence.loss_mark and sequence.scheduled == 0:
                num_blocks = self._prefix_cache.num_refilled(sequence)
                sequence.scheduled = sequence.computed = num_blocks * self.config.block_size
                sequence.num_published = num_blocks

    def _compose_alone(self, lone: str) -> list[Pick]:
        if self.lanes.holds_others_than(lone):
            return []
        returned = [s for s in self._roster.returned if s.request.id == lone]
        filling = [s for s in self._roster.filling if s.request.id == lone]
        return self._composer.compose(returned, len(returned), filling, 1)

    def _build(self, picks: list[Pick]) -> StepPlan:
        parts: list[tuple[Sequence, Slice]] = []
        copies: list[tuple[int, int]] = []
        for sequence, num_tokens in picks:
            if sequence.fork_block is not None:
                own = sequence.block_table[sequence.scheduled // self.config.block_size]
                copies.append((sequence.fork_block, own))
                sequence.fork_block = None
                self._blocks.unpin(sequence.id)
            parts.append((sequence, sequence.take(num_tokens, self.config.block_size)))
        sequences = [sequence for sequence, _ in parts]
        for sequence in sequences:
            self._prefix_cache.offer(sequence)
        self._roster.slices_taken(sequences)
        return self.lanes.plan(tuple(parts), copies)

    def commit(self, result: StepResult, now: float) -> list[SequenceEvent]:
        """Apply the last stage's result of a step. A result of an older epoch or an unknown step is ignored."""
        taken = self.lanes.take(result)
        if taken is None:
            return []
        parts, void = taken
        accepted = self.lanes.guesses["accepted"]
        drawn: dict[int, list[Drawn]] = defaultdict(list)
        for of in result.drawn:
            drawn[of.sequence_id].append(of)
        scored = {s.sequence_id: s for s in result.scored}
        events: list[SequenceEvent] = []
        for sequence, piece in parts:
            sequence.steps_in_flight -= 1
            if sequence.status is SequenceStatus.ENDING:
                if sequence.steps_in_flight == 0:
                    self._release(sequence)
            elif sequence.id not in void:
                num_before = len(sequence.token_ids)
                events += self._apply(sequence, piece, drawn[sequence.id], scored.get(sequence.id))
                if num_new := len(sequence.token_ids) - num_before:
                    self._speculation.token_returned(sequence, num_new, len(self._roster), now)
        num_tokens = sum(len(piece.token_ids) - piece.num_guesses for _, piece in parts)
        num_tokens += self.lanes.guesses["accepted"] - accepted
        self._throughput.committed(num_tokens, now, pipeline_empty=not len(self.lanes))
        return events

    def _apply(
        self, sequence: Sequence, piece: Slice, drawn: list[Drawn], scored: Scored | None
    ) -> Iterator[SequenceEvent]:
        group = self._groups[sequence.request.id]
        if piece.targets:
            if scored is None or len(scored.logprobs) != len(piece.targets):
                yield from self._fail(group, "the prompt could not be scored")
                return
            sequence.scores.extend(scored.logprobs)
        sequence.computed = piece.end - piece.num_guesses + piece.is_guessed
        if piece.draw is None and sequence.known_end and sequence.computed == len(sequence.token_ids):
            yield self._end(sequence, group, finish=sequence.known_end)
            return
        for row in range(piece.num_draws):
            if row:
                if sequence.token_ids[sequence.computed] != piece.token_ids[row - piece.num_draws]:
                    break
                sequence.computed += 1
            event = self._drawn(sequence, group, drawn[row] if row < len(drawn) else None)
            yield event
            if event.is_terminal:
                return
        if piece.draw is None:
            return
        if sequence.remaining:
            self._roster.token_returned(sequence)
        if self._quarantine.watches(group.key) and all(len(s.token_ids) > s.loss_mark for s in group.live):
            self._quarantine.cleared(group.key)

    def _drawn(self, sequence: Sequence, group: SequenceGroup, drawn: Drawn | None) -> SequenceEvent:
        """The sequence's next token, or its end because there is none."""
        if drawn is None or drawn.token_id is None:
            self._blocks.forget_contents_of(sequence.id)  # their KV may hold non-finite values: never share them
            return self._end(sequence, group, error=RequestFailed("the model's output is not finite"))
        self.lanes.drawn(sequence, drawn.token_id)
        self._queue.charge(group.caller, 1)
        end = sequence.end_after(drawn.token_id, self.config.eos_id)
        token_id, logprobs = drawn.token_id, drawn.logprobs
        event = sequence.event(token_id=token_id, logprobs=logprobs, finish=end, admitted_s=group.admitted_s)
        if end is not None:
            self._retire(sequence, group)
        return event

    def lose_stage(self, epoch: int, failed: Set[int], now: float) -> list[SequenceEvent]:
        """Begin a new epoch: steps in flight are discarded, and every sequence is computed again.

        failed: the stages whose failure ended the last epoch; none where no request can be blamed.
        No token is lost, so there are no events, except for a request that is certain to have killed the stage:
        it fails.
        """
        culprit = self._quarantine.lost(self.lanes.lose(epoch), failed)
        self._blocks.forget_contents()
        for sequence in list(self._ending.values()):
            self._release(sequence)
        for sequence in self._roster.running:
            self.lanes.guesses["cancelled"] += len(sequence.guesses)
            sequence.rewind()
            self._blocks.unpin(sequence.id)
        self._roster.restart()
        if culprit is None:
            return []
        return self._fail(self._groups[culprit], "a stage died each time this request was computed")

    def _fail(self, group: SequenceGroup, problem: str) -> list[SequenceEvent]:
        return [self._end(s, group, error=RequestFailed(problem)) for s in group.live]
