"""The request queue: the requests of all replicas, those that wait, and which replica takes the next one.

Queue, fairness, refusals, deadlines and quarantine are common to all replicas; blocks, slots and steps are each
replica's own (`scheduler`). Laws

- Requests are admitted in the queue's order, until the first that fits nowhere.
- Of the replicas with room, a request goes to the one where fewest tokens are left to compute: of all its
  requests, and of this one without the prefix that is cached there. So a cached prefix counts for as much as it
  saves, and a replica that is much busier than another does not get every request with a common prefix.
- Requests that a replica gives back, because it is lost or drained, go before all waiting ones, in the order of
  their first admission. They keep their tokens and are computed again. Of a lost replica that is the only one,
  requests keep their blocks, and wait for it.
- A suspect of the quarantine runs alone in the replica that died with it; others go on with all but suspects.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Set

from ppserve.core.request import FinishReason, Request
from ppserve.core.scheduling.admission import (
    LoadEstimate,
    Refusals,
    TooLate,
    refusals_by_number,
    refuse_impossible,
    refuse_overload,
    too_late,
)
from ppserve.core.scheduling.block_manager import BlockTable
from ppserve.core.scheduling.fairness import FairQueue
from ppserve.core.scheduling.poison_isolation import PoisonIsolation
from ppserve.core.scheduling.scheduler_protocol import RequestScheduler
from ppserve.core.scheduling.sequence import Sequence, SequenceEvent, SequenceGroup, SequenceStatus
from ppserve.core.scheduling.throughput import Throughput
from ppserve.errors import InvalidRequest, RequestError, RequestFailed, Violation


class RequestQueue:
    """See the module. `now` is the head's monotonic clock, in seconds. groups: the open requests, by id."""

    def __init__(self) -> None:
        self.groups: dict[str, SequenceGroup] = {}
        self.queue = FairQueue()
        self.poison_isolation = PoisonIsolation()
        self._throughput = Throughput()
        self._late: TooLate | None = None  # the latest such refusal
        self._schedulers: list[RequestScheduler] = []
        self._homes: dict[str, RequestScheduler] = {}
        self._returned: dict[str, SequenceGroup] = {}
        self._next_deadline_s = math.inf  # no open request has an earlier one
        self._may_move = True
        self._next_sequence_id = 0

    # Replicas

    def join(self, scheduler: RequestScheduler) -> None:
        self._schedulers.append(scheduler)
        self.queue.aging_s = scheduler.config.aging_s
        self.look_again()

    def leave(self, scheduler: RequestScheduler) -> None:
        """A replica is gone for good, and has given its requests back."""
        self._schedulers.remove(scheduler)

    @property
    def has_several_schedulers(self) -> bool:
        return len(self._schedulers) > 1

    @property
    def num_waiting(self) -> int:
        """Requests that no replica computes."""
        return len(self.queue) + len(self._returned)

    def look_again(self) -> None:
        """Room was made, or a replica opened: the next waiting request may fit now."""
        self._may_move = True

    # Requests

    def submit(self, request: Request, now: float) -> None:
        """Queue a request. Raises InvalidRequest (it can never run) or Overloaded (it cannot run now)."""
        if request.id in self.groups:
            raise InvalidRequest([Violation("request_id", "is in use by another request")])
        config = self._schedulers[0].config
        refuse_impossible(request, config, min(scheduler.num_blocks for scheduler in self._schedulers))
        new_client = self.queue.is_idle(request.caller)
        refusal = self.refusals(now).of_request(request, now, new_client)
        if refusal is None:
            refusal = late = too_late(request, self._load, now, new_client)
            self._late = late or self._late
        if refusal is not None:
            raise refusal.with_traceback(None)
        indices = range(request.num_sequences) if request.resume_index is None else [request.resume_index]
        first_id = self._next_sequence_id
        sequences = [Sequence(first_id + i, request, index, config.eos_id) for i, index in enumerate(indices)]
        sequences[0].wants_scores = request.output.prompt_logprobs is not None and not request.resume_ids
        group = SequenceGroup(request, sequences, now)
        self.groups[request.id] = group
        self.queue.push(group)
        self._may_move = True
        self.admit(now)  # first, so that the queue's bounds hold for requests that do wait
        if group.admitted_s is None:
            try:
                refuse_overload(group, self._load(), config, now, new_client)
            except RequestError:
                self._leave(group)
                raise
        self._next_sequence_id += len(sequences)
        if request.deadline_s is not None:
            self._next_deadline_s = min(self._next_deadline_s, request.deadline_s)

    def refusals(self, now: float) -> Refusals:
        """What requests would be refused with now, whatever their prompts."""
        self._late = self._late and self._late.as_of(now, self._load)
        if not self._schedulers or any(scheduler.may_admit for scheduler in self._schedulers):
            return Refusals(late=self._late)
        return refusals_by_number(self.queue, self._throughput, self._schedulers[0].config, self._late)

    def _load(self) -> LoadEstimate:
        running = [s for g in self.groups.values() if g.admitted_s is not None for s in g.live]
        return LoadEstimate(running, self.queue, self._throughput)

    def abort(self, request_id: str, reason: FinishReason) -> list[SequenceEvent]:
        """End a request now, whatever its state. Nothing happens if it is unknown or has ended."""
        group = self.groups.get(request_id)
        if group is None:
            return []
        return [self.end(s, group, finish=reason) for s in group.live]

    def finish(self, sequence_id: int, reason: FinishReason) -> None:
        """End a sequence whose end the engine has found (a stop string): no event, no further step. If it ended
        by itself in the same step, nothing happens."""
        for scheduler in self._schedulers:
            sequence = scheduler.running(sequence_id)
            if sequence is not None:
                self.end(sequence, self.groups[sequence.request.id], finish=reason)
                return

    def expire(self, now: float) -> list[SequenceEvent]:
        """End every request whose deadline has passed."""
        if now < self._next_deadline_s:
            return []
        requests = [g.request for g in self.groups.values()]
        deadlines = sorted((r.deadline_s, r.id) for r in requests if r.deadline_s is not None)
        overdue = [key for deadline_s, key in deadlines if deadline_s <= now]
        self._next_deadline_s = deadlines[len(overdue)][0] if len(overdue) < len(deadlines) else math.inf
        return [event for key in overdue for event in self.abort(key, FinishReason.DEADLINE)]

    def end(
        self,
        sequence: Sequence,
        group: SequenceGroup,
        *,
        finish: FinishReason | None = None,
        error: RequestError | None = None,
    ) -> SequenceEvent:
        """End a live sequence. Steps in flight may still hold it."""
        event = sequence.event(finish=finish, error=error, admitted_s=group.admitted_s, replica=group.replica)
        self.retire(sequence, group, was_late=finish is FinishReason.DEADLINE)
        return event

    def fail(self, group: SequenceGroup, problem: str) -> list[SequenceEvent]:
        return [self.end(s, group, error=RequestFailed(problem)) for s in group.live]

    def retire(self, sequence: Sequence, group: SequenceGroup, was_late: bool = False) -> None:
        """A live sequence has had its last event. was_late: its deadline passed."""
        if sequence.status is SequenceStatus.WAITING:
            sequence.move_to(SequenceStatus.ENDED)
        else:
            self._homes[group.key].drop(sequence)
        if not group.live:
            self._leave(group, was_late)
        self._may_move = True

    def _leave(self, group: SequenceGroup, was_late: bool = False) -> None:
        """All sequences of a request have ended. How little a late one has used says nothing of what the next one
        will need: if it counted, overload would look like short answers, and ever more would be admitted."""
        if group.admitted_s is not None and not was_late:
            self._throughput.request_ended(group.num_tokens, group.num_known_tokens)
        if group in self.queue:
            self.queue.remove(group)
        self._returned.pop(group.key, None)
        self._homes.pop(group.key, None)
        self.queue.leave(group.caller)
        self.poison_isolation.cleared(group.key)
        del self.groups[group.key]

    # Admission

    def lone_at(self, scheduler: RequestScheduler) -> str | None:
        """The only request that this replica may compute now; None = all of its own."""
        lone = self.poison_isolation.lone
        return lone if lone is not None and self._homes.get(lone) is scheduler else None

    def admit(self, now: float) -> None:
        """Admit waiting requests, in their order, until the first that fits nowhere."""
        while self._may_move:
            schedulers = [
                scheduler
                for scheduler in self._schedulers
                if scheduler.may_admit and self.lone_at(scheduler) is None
            ]
            if not schedulers:
                break
            group = self._first(schedulers, now)
            if group is None or not self._place(group, self._schedulers_for(group, schedulers), now):
                self._may_move = False

    def _first(self, schedulers: list[RequestScheduler], now: float) -> SequenceGroup | None:
        """The next to be admitted: a lone suspect, then what was given back, then the queue's first."""
        lone = self._returned.get(self.poison_isolation.lone or "")
        if lone is not None and self._schedulers_for(lone, schedulers):
            return lone
        innocent = (group for group in self._returned.values() if not self.poison_isolation.suspects(group.key))
        return next(innocent, None) or self.queue.first(now)

    def _schedulers_for(self, group: SequenceGroup, schedulers: list[RequestScheduler]) -> list[RequestScheduler]:
        """Of these, where the request may run. A lone suspect waits for the replica that died with it, unless that
        is gone for good, or another has nothing to lose."""
        own = group.replica
        if group.key != self.poison_isolation.lone or all(
            scheduler.config.replica != own for scheduler in self._schedulers
        ):
            return schedulers
        return [
            scheduler for scheduler in schedulers if scheduler.config.replica == own or scheduler.tokens_left == 0
        ]

    def _place(self, group: SequenceGroup, schedulers: list[RequestScheduler], now: float) -> bool:
        """Whether a replica had room."""
        able = [(scheduler, known) for scheduler in schedulers if (known := scheduler.room_for(group)) is not None]
        if not able:
            return False
        scheduler, known = able[0]
        if len(able) > 1:
            scheduler, known = min(able, key=lambda pair: _tokens_left(pair[0], pair[1], group))
        self._homes[group.key] = scheduler
        group.replica = scheduler.config.replica
        if group.admitted_s is not None:
            del self._returned[group.key]
            scheduler.admit(group, known, now)
            return True
        self.queue.remove(group)
        group.admitted_s = now
        scheduler.admit(group, known, now)
        leader = group.sequences[0]
        prompt_tokens = len(leader.token_ids) - leader.scheduled
        self._throughput.request_admitted(prompt_tokens)
        self.queue.charge(group.caller, prompt_tokens)
        return True

    def give_back(self, groups: Iterable[SequenceGroup]) -> None:
        """Takes back requests that have no admitted sequence left; they go on when there is room for them."""
        self._returned |= {group.key: group for group in groups}
        for key in self._returned:
            self._homes.pop(key, None)
        in_order = sorted(self._returned.values(), key=lambda group: group.admitted_s or 0.0)
        self._returned = {group.key: group for group in in_order}
        self.look_again()

    # Computing

    def step_scheduled(self, now: float) -> None:
        """A replica schedules a step while it has none in flight."""
        if not any(scheduler.is_busy for scheduler in self._schedulers):
            self._throughput.started(now)

    def step_committed(self, num_tokens: int, now: float) -> None:
        is_empty = not any(scheduler.is_busy for scheduler in self._schedulers)
        self._throughput.committed(num_tokens, now, pipeline_empty=is_empty)

    def token_drawn(self, group: SequenceGroup) -> None:
        self.queue.charge(group.caller, 1)

    def token_withheld(self, caller: str) -> None:
        """A draft token brought a token beyond the end that the engine has found: it is charged to nobody."""
        self.queue.refund(caller)

    def clear(self, group: SequenceGroup) -> None:
        """It gained a token since its last loss: it did not cause that."""
        self.poison_isolation.cleared(group.key)
        self.look_again()

    def blame(
        self, scheduler: RequestScheduler, in_flight: Iterable[str], failed: Set[Hashable]
    ) -> list[SequenceEvent]:
        """Ranks of a replica failed with steps of these requests in flight. A request that is certain to have
        killed them fails."""
        elsewhere = {key for key, home in self._homes.items() if home is not scheduler} | self._returned.keys()
        culprit = self.poison_isolation.lost([key for key in in_flight if key in self.groups], failed, elsewhere)
        self.look_again()
        if culprit is None:
            return []
        return self.fail(self.groups[culprit], "a stage died each time this request was computed")


def _tokens_left(scheduler: RequestScheduler, known: BlockTable, group: SequenceGroup) -> int:
    """At a replica, with this request there."""
    cached = len(known) * scheduler.config.block_size
    return scheduler.tokens_left + sum(len(s.token_ids) for s in group.live) - cached
