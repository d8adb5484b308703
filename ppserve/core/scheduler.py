"""The scheduler: which tokens of which sequences go into the next step.

It owns every request's progress and is the only one of its kind; it runs on the head and is told
everything: requests, results, losses and the time. It reads no clock and does no I/O.

Laws
- Nothing is guessed: a sequence's next token is scheduled when the one before it has come back. So
  no step follows an end, and no placeholder is ever sent.
- Stages run steps in order. Hence a prompt's next chunk may follow while the one before is in flight, a
  block may be shared as soon as the step that fills it is scheduled, and a freed block may be reused at once.
- Worst-case blocks are reserved at admission; an admitted sequence is never preempted. Losing a
  stage is everybody's preemption: tokens and block tables stay, computation starts over.
- Every sequence causes exactly one terminal event, except one that the engine itself ends (`finish`).

The engine's round: `expire(now)`, then `schedule(now)` until it returns None; `commit` for every result.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from ppserve.core.block_manager import BlockManager, block_digest
from ppserve.core.composer import Composer, CostModel, StepLimits
from ppserve.core.fairness import FairQueue
from ppserve.core.plan import Drawn, Scored, Slice, StepPlan, StepResult
from ppserve.core.quarantine import Quarantine
from ppserve.core.request import FinishReason, Request
from ppserve.core.sequence import InvalidTransition, Sequence, SequenceEvent, SequenceStatus
from ppserve.core.throughput import Throughput
from ppserve.errors import InvalidRequest, Overloaded, RequestError, RequestFailed, Violation

__all__ = ["InvalidTransition", "Scheduler", "SchedulerConfig", "SequenceEvent"]

MIN_RETRY_S, MAX_RETRY_S = 0.1, 30.0


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """microbatches: steps in flight, None = as many as stages. max_queue and max_queue_tokens: what may
    wait, in requests and in tokens (prompt + max_tokens, times n). prefill_chunk: prompt tokens per step,
    None = automatic. eos_id: None when the model has none. aging_s: waiting time worth one priority class.
    """

    num_stages: int
    microbatches: int | None = None
    max_num_seqs: int = 256
    max_queue: int = 1024
    max_queue_tokens: int = 1_048_576
    max_model_len: int = 1024
    block_size: int = 16
    prefill_chunk: int | None = None
    prefix_cache: bool = True
    eos_id: int | None = None
    aging_s: float = 10.0


class SequenceGroup:
    """The sequences of one request. admitted_s: None while it waits."""

    __slots__ = ("admitted_s", "num_tokens", "request", "sequences", "submitted_s")

    def __init__(self, request: Request, sequences: list[Sequence], submitted_s: float) -> None:
        self.request = request
        self.sequences = sequences
        self.submitted_s = submitted_s
        self.admitted_s: float | None = None
        self.num_tokens = len(sequences) * (len(request.prompt_ids) + request.stop.max_tokens)

    @property
    def key(self) -> str:
        return self.request.id

    @property
    def caller(self) -> str:
        return self.request.caller

    @property
    def priority(self) -> int:
        return self.request.priority


@dataclass(frozen=True, slots=True)
class _Step:
    """A step in flight."""

    plan: StepPlan
    parts: tuple[tuple[Sequence, Slice], ...]


class Scheduler:
    """See the module's laws. Methods that take `now` want the head's monotonic clock, in seconds."""

    def __init__(
        self, config: SchedulerConfig, blocks: BlockManager, costs: CostModel | None = None, epoch: int = 0
    ) -> None:
        if blocks.block_size != config.block_size:
            raise ValueError(f"block_size: {config.block_size} here, {blocks.block_size} in the block manager")
        self.config = config
        self.epoch = epoch
        self.prefix_tokens_asked = 0
        self.prefix_tokens_found = 0
        self._blocks = blocks
        self._composer = Composer(StepLimits(config.prefill_chunk), costs)
        self._queue: FairQueue[SequenceGroup] = FairQueue(config.aging_s)
        self._quarantine = Quarantine()
        self._throughput = Throughput()
        self._groups: dict[str, SequenceGroup] = {}
        self._running: dict[int, Sequence] = {}
        self._ending: dict[int, Sequence] = {}
        self._returned: dict[int, Sequence] = {}  # ready decodes, oldest return first
        self._filling: dict[int, Sequence] = {}  # prompt or replay tokens left, in order of admission
        self._siblings: dict[int, list[Sequence]] = {}  # leader -> those who wait for its prompt
        self._steps: dict[int, _Step] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._microbatches = config.microbatches or config.num_stages
        self._queue_may_move = True
        self._next_step_id = 0
        self._next_sequence_id = 0

    # What others may ask

    @property
    def num_running(self) -> int:
        """Admitted sequences whose end is still to come."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def num_waiting_tokens(self) -> int:
        return self._queue.num_tokens

    @property
    def num_in_flight(self) -> int:
        """Steps that were scheduled and have not come back."""
        return len(self._steps)

    @property
    def has_work(self) -> bool:
        return bool(self._groups or self._steps)

    @property
    def kv_usage(self) -> float:
        """Share of KV blocks held by sequences, 0 to 1."""
        return self._blocks.num_held / self._blocks.num_blocks

    @property
    def microbatches(self) -> int:
        return self._microbatches

    def set_microbatches(self, microbatches: int) -> None:
        """Change how many steps may be in flight; those above the new number drain."""
        if not 1 <= microbatches <= self.config.num_stages + 1:
            raise ValueError(f"microbatches: {microbatches} is not within 1 .. {self.config.num_stages + 1}")
        self._microbatches = microbatches

    def next_deadline(self) -> float | None:
        """When `expire` has something to do at the earliest; None when no request has a deadline."""
        while self._deadlines and self._is_stale(*self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    # Requests come and go

    def submit(self, request: Request, now: float) -> None:
        """Queue a request. Raises InvalidRequest (can never run) or Overloaded (not now)."""
        self._refuse_impossible(request)
        indices = range(request.num_sequences) if request.resume_index is None else [request.resume_index]
        first_id = self._next_sequence_id
        sequences = [Sequence(first_id + i, request, index, self.config.eos_id) for i, index in enumerate(indices)]
        group = SequenceGroup(request, sequences, now)
        self._refuse_overload(group, now)
        self._next_sequence_id += len(sequences)
        sequences[0].wants_scores = request.output.prompt_logprobs is not None and not request.resume_ids
        self._groups[request.id] = group
        self._queue.push(group)
        self._queue_may_move = True
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, request.id))
            if len(self._deadlines) > 2 * len(self._groups) + 64:
                self._deadlines = [entry for entry in self._deadlines if not self._is_stale(*entry)]
                heapq.heapify(self._deadlines)

    def _refuse_impossible(self, request: Request) -> None:
        num_prompt, max_tokens = len(request.prompt_ids), request.stop.max_tokens
        num_sequences = request.num_sequences if request.resume_index is None else 1
        if request.id in self._groups:
            raise InvalidRequest([Violation("request_id", "is in use by another request")])
        violations = []
        if num_prompt == 0:
            violations.append(Violation("prompt", "has no tokens"))
        if len(request.resume_ids) > max_tokens:
            violations.append(Violation("resume.generated_token_ids", "more tokens than stop.max_tokens"))
        if num_prompt + max_tokens > self.config.max_model_len:
            limit = self.config.max_model_len
            violations.append(Violation("prompt", f"{num_prompt} tokens + {max_tokens} new exceed {limit}"))
        if not 1 <= num_sequences <= self.config.max_num_seqs:
            limit = self.config.max_num_seqs
            violations.append(Violation("sampling.n", f"{num_sequences} is not within 1 .. {limit}"))
        if not violations:
            positions = max(num_prompt, num_prompt + max_tokens - 1)
            num_blocks = self._worst_case_blocks(num_prompt, positions, num_sequences)
            if num_blocks > self._blocks.num_blocks:
                problem = f"needs {num_blocks} KV blocks, the server has {self._blocks.num_blocks}"
                violations.append(Violation("stop.max_tokens", problem))
        if violations:
            raise InvalidRequest(violations)

    def _worst_case_blocks(self, num_prompt: int, max_positions: int, num_sequences: int) -> int:
        shared = (num_prompt - 1) // self.config.block_size if num_sequences > 1 else 0
        return shared + num_sequences * (self._blocks.blocks_for(max_positions) - shared)

    def _refuse_overload(self, group: SequenceGroup, now: float) -> None:
        if len(self._queue) >= self.config.max_queue:
            raise Overloaded(f"{len(self._queue)} requests are waiting", self._retry_after_s())
        if len(self._queue) and self._queue.num_tokens + group.num_tokens > self.config.max_queue_tokens:
            raise Overloaded(f"{self._queue.num_tokens} tokens are waiting", self._retry_after_s())
        deadline_s, ahead = group.request.deadline_s, self._queue.tokens_ahead(group.request.priority)
        if deadline_s is not None and ahead:
            wait_s = self._throughput.seconds_for(ahead) or 0.0
            if now + wait_s > deadline_s:
                problem = f"the wait is about {wait_s:.1f} s, longer than the deadline"
                raise Overloaded(problem, self._retry_after_s())

    def _retry_after_s(self) -> float:
        """When about half of what waits now will have been served."""
        wait_s = self._throughput.seconds_for(self._queue.num_tokens // 2)
        return min(MAX_RETRY_S, max(MIN_RETRY_S, wait_s if wait_s is not None else 1.0))

    def abort(self, request_id: str, reason: FinishReason) -> list[SequenceEvent]:
        """End a request now, wherever it is; nothing happens when it is not (or no longer) there."""
        group = self._groups.get(request_id)
        if group is None:
            return []
        return [self._end(s, group, finish=reason) for s in group.sequences if s.is_live]

    def finish(self, sequence_id: int, reason: FinishReason, now: float) -> None:
        """The engine found the end itself (a stop string): no event, no further step."""
        sequence = self._running.get(sequence_id)
        if sequence is not None:
            self._end(sequence, self._groups[sequence.request.id], finish=reason)

    def expire(self, now: float) -> list[SequenceEvent]:
        """End every request whose deadline has passed, before it costs a step."""
        events = []
        while (deadline_s := self.next_deadline()) is not None and deadline_s <= now:
            events += self.abort(heapq.heappop(self._deadlines)[1], FinishReason.DEADLINE)
        return events

    def _is_stale(self, deadline_s: float, request_id: str) -> bool:
        group = self._groups.get(request_id)
        return group is None or group.request.deadline_s != deadline_s

    def _end(
        self,
        sequence: Sequence,
        group: SequenceGroup,
        *,
        finish: FinishReason | None = None,
        error: RequestError | None = None,
    ) -> SequenceEvent:
        """Take a live sequence out of everything but the steps that still hold it."""
        event = sequence.event(finish=finish, error=error, admitted_s=group.admitted_s)
        self._retire(sequence, group)
        return event

    def _retire(self, sequence: Sequence, group: SequenceGroup) -> None:
        self._returned.pop(sequence.id, None)
        self._filling.pop(sequence.id, None)
        self._forget_sibling(sequence)
        if sequence.status is SequenceStatus.WAITING:
            sequence.move_to(SequenceStatus.ENDED)
        else:
            del self._running[sequence.id]
            if sequence.steps_in_flight:
                sequence.move_to(SequenceStatus.ENDING)
                self._ending[sequence.id] = sequence
            else:
                self._release(sequence)
        if not any(s.is_live for s in group.sequences):
            if group.key in self._queue:
                self._queue.remove(group.key)
            self._queue.leave(group.caller)
            self._quarantine.cleared(group.key)
            del self._groups[group.key]
        self._queue_may_move = True

    def _release(self, sequence: Sequence) -> None:
        sequence.move_to(SequenceStatus.ENDED)
        self._blocks.release(sequence.id)
        self._ending.pop(sequence.id, None)
        self._queue_may_move = True

    # Admission

    def _admit(self, now: float) -> None:
        """Let waiting requests in, in the queue's order, until the first that does not fit."""
        while self._queue_may_move:
            group = self._queue.first(now)
            if group is None or not self._try_admit(group, now):
                self._queue_may_move = False
                return

    def _try_admit(self, group: SequenceGroup, now: float) -> bool:
        leader, *siblings = group.sequences
        if len(self._running) + len(group.sequences) > self.config.max_num_seqs:
            return False
        known_prefix = self._known_prefix(leader)
        num_needed = self._worst_case_blocks(
            len(group.request.prompt_ids), leader.max_positions, len(group.sequences)
        ) - len(known_prefix)
        if not self._blocks.fits(num_needed, known_prefix):
            return False
        if not leader.wants_scores:
            self.prefix_tokens_asked += len(leader.token_ids)
            self.prefix_tokens_found += len(known_prefix) * self.config.block_size
        self._queue.remove(group.key)
        group.admitted_s = now
        self._start(leader, known_prefix)
        leader.scheduled = leader.computed = len(known_prefix) * self.config.block_size
        leader.num_published = len(known_prefix)
        num_shared = (len(group.request.prompt_ids) - 1) // self.config.block_size
        for sibling in siblings:
            self._start(sibling, leader.block_table[:num_shared])
            if (len(group.request.prompt_ids) - 1) % self.config.block_size:
                sibling.fork_block = leader.block_table[num_shared]
                self._blocks.pin(sibling.id, sibling.fork_block)
        for sequence in group.sequences:
            sequence.cached_tokens = leader.scheduled
        self._filling[leader.id] = leader
        if siblings:
            self._siblings[leader.id] = siblings
            self._release_siblings(leader)
        self._queue.charge(group.caller, len(leader.token_ids) - leader.scheduled)
        return True

    def _start(self, sequence: Sequence, shared: tuple[int, ...]) -> None:
        table = self._blocks.try_allocate(sequence.id, self._blocks.blocks_for(sequence.max_positions), shared)
        assert table is not None, "the fit was checked"
        sequence.block_table = table
        sequence.move_to(SequenceStatus.RUNNING)
        self._running[sequence.id] = sequence

    def _known_prefix(self, sequence: Sequence) -> tuple[int, ...]:
        """Cached blocks that a sequence may begin with: never all of its tokens, never unscored ones."""
        if not self.config.prefix_cache or sequence.wants_scores:
            return ()
        num_blocks = (len(sequence.token_ids) - 1) // self.config.block_size
        self._extend_digests(sequence, num_blocks)
        return self._blocks.match(sequence.digests[:num_blocks])

    def _extend_digests(self, sequence: Sequence, num_blocks: int) -> None:
        size, digests = self.config.block_size, sequence.digests
        while len(digests) < num_blocks:
            start = len(digests) * size
            digests.append(block_digest(digests[-1] if digests else b"", sequence.token_ids[start : start + size]))

    # Steps

    def schedule(self, now: float) -> StepPlan | None:
        """The next step; None when the pipeline is full or nothing is ready."""
        if len(self._steps) >= self._microbatches:
            return None
        lone = self._quarantine.lone
        if lone is None:
            self._admit(now)
            picks = self._composer.compose(
                self._returned.values(), self._num_decoding, self._filling.values(), self._microbatches
            )
        else:
            picks = self._compose_alone(lone)
        if not picks:
            return None
        if not self._steps:
            self._throughput.started(now)
        return self._build(picks)

    @property
    def _num_decoding(self) -> int:
        waiting = sum(len(siblings) for siblings in self._siblings.values())
        return len(self._running) - len(self._filling) - waiting

    def _compose_alone(self, lone: str) -> list[tuple[Sequence, int]]:
        if any(s.request.id != lone for step in self._steps.values() for s, _ in step.parts):
            return []
        returned = [s for s in self._returned.values() if s.request.id == lone]
        filling = [s for s in self._filling.values() if s.request.id == lone]
        return self._composer.compose(returned, len(returned), filling, 1)

    def _build(self, picks: list[tuple[Sequence, int]]) -> StepPlan:
        parts: list[tuple[Sequence, Slice]] = []
        copies: list[tuple[int, int]] = []
        for sequence, num_tokens in picks:
            if sequence.fork_block is not None:
                own = sequence.block_table[sequence.scheduled // self.config.block_size]
                copies.append((sequence.fork_block, own))
                sequence.fork_block = None
                self._blocks.unpin(sequence.id)
            parts.append((sequence, sequence.take(num_tokens, self.config.block_size)))
        for sequence, _ in parts:
            if sequence.remaining == 0:
                self._filling.pop(sequence.id, None)
                self._returned.pop(sequence.id, None)
            self._publish(sequence)
            if sequence.id in self._siblings:
                self._release_siblings(sequence)
        used = {step.plan.lane for step in self._steps.values()}
        lane = next(lane for lane in range(len(used) + 1) if lane not in used)
        plan = StepPlan(self.epoch, self._next_step_id, lane, tuple(part[1] for part in parts), tuple(copies))
        self._steps[plan.step_id] = _Step(plan, tuple(parts))
        self._next_step_id += 1
        return plan

    def _publish(self, sequence: Sequence) -> None:
        """Make the blocks that are full with this step findable: any later step runs after it."""
        num_full = sequence.scheduled // self.config.block_size
        if num_full == sequence.num_published or not self.config.prefix_cache:
            return
        self._extend_digests(sequence, num_full)
        for i in range(sequence.num_published, num_full):
            self._blocks.publish(sequence.block_table[i], sequence.digests[i])
        sequence.num_published = num_full

    def _release_siblings(self, leader: Sequence) -> None:
        """Siblings start at the prompt's last token once all before it is scheduled."""
        fork = len(leader.request.prompt_ids) - 1
        if leader.scheduled < fork:
            return
        for sibling in self._siblings.pop(leader.id):
            sibling.scheduled = sibling.computed = fork
            sibling.num_published = fork // self.config.block_size
            self._returned[sibling.id] = sibling

    def _forget_sibling(self, ended: Sequence) -> None:
        """Keep the sibling lists free of ended sequences; a leader ends only with its whole request."""
        for leader_id, siblings in list(self._siblings.items()):
            if ended in siblings:
                siblings.remove(ended)
                if not siblings:
                    del self._siblings[leader_id]

    def commit(self, result: StepResult, now: float) -> list[SequenceEvent]:
        """Apply what the last stage says of a step; a result of an older epoch or unknown step is ignored."""
        step = self._steps.pop(result.step_id, None) if result.epoch == self.epoch else None
        if step is None:
            return []
        self._throughput.committed(step.plan.num_tokens, now, pipeline_empty=not self._steps)
        drawn = {d.sequence_id: d for d in result.drawn}
        scored = {s.sequence_id: s for s in result.scored}
        events: list[SequenceEvent] = []
        for sequence, piece in step.parts:
            sequence.steps_in_flight -= 1
            sequence.computed = max(sequence.computed, piece.end)
            if sequence.status is SequenceStatus.ENDING:
                if sequence.steps_in_flight == 0:
                    self._release(sequence)
            else:
                self._apply(sequence, piece, drawn.get(sequence.id), scored.get(sequence.id), events)
        return events

    def _apply(
        self,
        sequence: Sequence,
        piece: Slice,
        drawn: Drawn | None,
        scored: Scored | None,
        events: list[SequenceEvent],
    ) -> None:
        group = self._groups[sequence.request.id]
        if piece.targets:
            if scored is None or len(scored.logprobs) != len(piece.targets):
                events += self._fail(group, "the prompt could not be scored")
                return
            sequence.scores.extend(scored.logprobs)
        if piece.draw is None:
            if sequence.known_end is not None and sequence.computed == len(sequence.token_ids):
                events.append(self._end(sequence, group, finish=sequence.known_end))
            return
        if drawn is None or drawn.token_id is None:
            events.append(self._end(sequence, group, error=RequestFailed("the model's output is not finite")))
            return
        sequence.token_ids.append(drawn.token_id)
        self._queue.charge(group.caller, 1)
        end = sequence.end_after(drawn.token_id, self.config.eos_id)
        events.append(
            sequence.event(
                token_id=drawn.token_id, logprobs=drawn.logprobs, finish=end, admitted_s=group.admitted_s
            )
        )
        if end is not None:
            self._retire(sequence, group)
            return
        self._returned[sequence.id] = sequence
        if self._quarantine.watches(group.key) and not any(
            s.is_live and len(s.token_ids) <= s.loss_mark for s in group.sequences
        ):
            self._quarantine.cleared(group.key)

    def lose_stage(self, epoch: int, now: float) -> list[SequenceEvent]:
        """Begin a new epoch: what was in flight never happened, and everybody computes anew.

        Nobody's tokens are lost, so nobody hears of it, except a request that is certain to have
        killed the stage: it fails.
        """
        assert epoch > self.epoch, (epoch, self.epoch)
        self.epoch = epoch
        in_flight = {s.request.id for step in self._steps.values() for s, _ in step.parts if s.is_live}
        self._steps.clear()
        self._returned.clear()
        self._filling.clear()
        self._siblings.clear()
        self._blocks.forget_contents()
        for sequence in list(self._ending.values()):
            self._release(sequence)
        for sequence in self._running.values():
            sequence.rewind()
            sequence.fork_block = None
            self._blocks.unpin(sequence.id)
            self._filling[sequence.id] = sequence
        culprit = self._quarantine.lost(in_flight)
        if culprit is None or culprit not in self._groups:
            return []
        return self._fail(self._groups[culprit], "a stage died each time this request was computed")

    def _fail(self, group: SequenceGroup, problem: str) -> list[SequenceEvent]:
        return [self._end(s, group, error=RequestFailed(problem)) for s in group.sequences if s.is_live]

    def check_invariants(self) -> None:
        """What must hold between any two calls. Raises AssertionError."""
        self._blocks.check_invariants()
        assert len(self._steps) <= self.config.num_stages + 1
        in_flight: dict[int, list[Slice]] = {}
        for step in self._steps.values():
            assert len({s.id for s, _ in step.parts}) == len(step.parts), "a sequence twice in one step"
            for sequence, piece in step.parts:
                in_flight.setdefault(sequence.id, []).append(piece)
        for sequence in (*self._running.values(), *self._ending.values()):
            assert 0 <= sequence.computed <= sequence.scheduled <= len(sequence.token_ids)
            pieces = in_flight.pop(sequence.id, [])
            assert len(pieces) == sequence.steps_in_flight
            position = sequence.computed
            for piece in pieces:
                assert piece.start == position, "slices in flight must follow one another"
                assert piece is pieces[-1] or piece.draw is None, "nothing follows a draw that is in flight"
                position = piece.end
            assert position == sequence.scheduled
            assert sequence.block_table == self._blocks.table(sequence.id)
        assert not in_flight, "an ended sequence is still in flight"
        waits = [s.id for siblings in self._siblings.values() for s in siblings]
        for sequence in self._running.values():
            places = (sequence.id in self._returned, sequence.id in self._filling, sequence.id in waits)
            assert sum(places) == (sequence.remaining > 0), (sequence.id, places, sequence.remaining)
        live = {s.id for g in self._groups.values() for s in g.sequences if s.is_live}
        queued = {s.id for g in self._queue.entries() for s in g.sequences}
        assert live == set(self._running) | queued
        assert not set(self._running) & queued
        if not self.has_work:
            assert self._blocks.num_held == 0, "idle, yet blocks are held"
