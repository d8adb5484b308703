"""The request queue: all open requests, those that wait, and which replica takes the next one.

All replicas share the queue, fairness, admission, deadlines and the isolation of poison requests. Each replica has
its own blocks, slots and steps (`scheduler`). Laws

- A submitted request is admitted, waits or is refused: with InvalidRequest if it does not fit an empty server,
  with Overloaded if the queue is full or its answer is predicted to miss its deadline.
- Waiting requests are admitted in `FairQueue`'s order, until the first that fits nowhere.
- A request goes to the replica with room where, with it, fewest tokens are left to compute. Its prefix that is
  cached there is not counted: so it attracts requests, but not to a replica that is much busier.
- Requests that a replica gives back keep their tokens and are computed again, before all others.
- Suspects run alone (`PoisonIsolation`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Set
from typing import Protocol

from ppserve.core.request import FinishReason, Request
from ppserve.core.scheduling.admission import FairQueue, Throughput, check_possible
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.sequence import Sequence, SequenceEvent, SequenceGroup, SequenceStatus
from ppserve.errors import DeadlinePassed, Overloaded, RequestError, RequestFailed

MIN_RETRY_S, MAX_RETRY_S = 0.1, 30.0
# With fewer running sequences, one more raises the throughput, so no answer's time is predicted.
_MANY_RUNNING = 8
# A factor on predicted times: under overload, requests admitted later take half of the steps.
_MARGIN = 2.5

SUSPICIOUS_LOSSES = 2
_CONVICTING_LOSSES_OF_ONE_RANK = 2
_CONVICTING_LOSSES = 4


class PoisonIsolation:
    """The requests, by id, that may kill stages: their numbers of losses, and the suspects.

    A loss does not show which request caused it, so everything in flight is computed again. A request that was
    in flight at two losses, with no token between them, becomes a suspect. Suspects run alone, one after the
    other, while other requests wait. A token clears a suspect. A suspect fails if, while it ran alone, the same
    rank failed twice in the same way, or ranks failed four times: at its fourth loss at the earliest.
    If no rank failed, as when a network is cut, no request is to blame.

    After an epoch in which no step returned, the next one begins with a probe, a step without a request. If it
    returns, the stages work, and restarts are counted anew. If a stage dies of it, no request is to blame.
    """

    def __init__(self) -> None:
        self.suspects: list[str] = []  # the first of them runs alone, the others wait
        self._losses: dict[str, int] = {}
        self._failures: list[Set[Hashable]] = []  # at each loss of the lone request: which ranks failed, and how

    @property
    def lone(self) -> str | None:
        """The only request that may run now; None = all may."""
        return self.suspects[0] if self.suspects else None

    def watches(self, request_id: str) -> bool:
        """Whether a request was in flight at a loss and is not cleared."""
        return request_id in self._losses

    def record_loss(self, in_flight: Set[str], failed: Set[Hashable]) -> str | None:
        """Ranks failed with these requests in flight. Returns the culprit, if it is certain.
        failed: each by its place in the pipeline and how it failed."""
        lone = self.lone
        if not failed:
            return None
        if lone is not None and lone in in_flight:
            self._failures.append(failed)
            times = max(sum(rank in each for each in self._failures) for rank in failed)
            if times < _CONVICTING_LOSSES_OF_ONE_RANK and len(self._failures) < _CONVICTING_LOSSES:
                return None
            self.clear(lone)
            return lone
        for request in sorted(in_flight):
            self._losses[request] = self._losses.get(request, 0) + 1
            if self._losses[request] >= SUSPICIOUS_LOSSES and request not in self.suspects:
                self.suspects.append(request)
        return None

    def clear(self, request_id: str) -> None:
        """The request gained a token since its last loss, or ended."""
        self._losses.pop(request_id, None)
        if request_id == self.lone:
            self._failures = []
        if request_id in self.suspects:
            self.suspects.remove(request_id)


class RequestScheduler(Protocol):
    """One replica's scheduler, as the request queue needs it; `Scheduler` documents the methods."""

    config: SchedulerConfig

    @property
    def num_blocks(self) -> int: ...
    @property
    def may_admit(self) -> bool: ...
    @property
    def is_busy(self) -> bool: ...
    @property
    def tokens_left(self) -> int: ...
    def tokens_with(self, group: SequenceGroup) -> int | None: ...
    def admit(self, group: SequenceGroup) -> None: ...
    def drop(self, sequence: Sequence) -> None: ...


class RequestQueue:
    """All open requests, by id in `groups`. `now` is the head's monotonic clock, in seconds."""

    def __init__(self) -> None:
        self.groups: dict[str, SequenceGroup] = {}
        self.queue = FairQueue()
        self.poison_isolation = PoisonIsolation()
        self._throughput = Throughput()
        self._schedulers: list[RequestScheduler] = []
        self._homes: dict[str, RequestScheduler] = {}
        self._next_deadline_s = math.inf  # no open request has an earlier one
        self._may_fit = True
        self._next_sequence_id = 0

    # Replicas

    def add_scheduler(self, scheduler: RequestScheduler) -> None:
        self._schedulers.append(scheduler)
        self.retry_admission()

    def remove_scheduler(self, scheduler: RequestScheduler) -> None:
        """A replica will not come back, and has given its requests back."""
        self._schedulers.remove(scheduler)

    @property
    def num_waiting(self) -> int:
        """Requests that no replica computes."""
        return len(self.queue)

    def retry_admission(self) -> None:
        """Room was made, or a replica opened: the next waiting request may fit now."""
        self._may_fit = True

    # Requests

    def submit(self, request: Request, now: float) -> None:
        """Admit or queue a request. Raises InvalidRequest, DeadlinePassed or Overloaded."""
        config = self._schedulers[0].config
        num_blocks = min(scheduler.num_blocks for scheduler in self._schedulers)
        check_possible(request, config, num_blocks)
        self.admit(now)
        group = SequenceGroup(request, self._next_sequence_id, config, now)
        tokens_ahead = self.queue.tokens_ahead(request)
        self.queue.push(group)
        self._may_fit = True
        assignment = self._next_assignment(now)
        fits = assignment is not None and assignment[0] is group
        problem = self._late(group, tokens_ahead, now, fits)
        if problem is None and not fits:
            problem = self._full(config)
        if problem:
            self.queue.remove(group)
            self.queue.end_request(request.caller)
            raise problem
        self.groups[request.id] = group
        self._next_sequence_id += len(group.sequences)
        if request.deadline_s is not None:
            self._next_deadline_s = min(self._next_deadline_s, request.deadline_s)
        if assignment is not None and fits:
            self._start(*assignment, now)

    def abort(self, request_id: str, reason: FinishReason, index: int | None = None) -> list[SequenceEvent]:
        """End a request, or one of its answers. Nothing happens if it is unknown or has ended."""
        group = self.groups.get(request_id)
        if group is None:
            return []
        ending = [s for s in group.live if index is None or s.index == index]
        return [self.end_sequence(s, group, finish=reason) for s in ending]

    def expire(self, now: float) -> list[SequenceEvent]:
        """End every request whose deadline has passed."""
        if now < self._next_deadline_s:
            return []
        requests = [g.request for g in self.groups.values()]
        deadlines = sorted((r.deadline_s, r.id) for r in requests if r.deadline_s is not None)
        overdue = [key for deadline_s, key in deadlines if deadline_s <= now]
        later = deadlines[len(overdue) :]
        self._next_deadline_s = later[0][0] if later else math.inf
        return [event for key in overdue for event in self.abort(key, FinishReason.DEADLINE)]

    def fail_request(self, group: SequenceGroup, problem: str) -> list[SequenceEvent]:
        return [self.end_sequence(s, group, error=RequestFailed(problem)) for s in group.live]

    def end_sequence(
        self,
        sequence: Sequence,
        group: SequenceGroup,
        *,
        finish: FinishReason | None = None,
        error: RequestError | None = None,
    ) -> SequenceEvent:
        """End a live sequence. Steps in flight may still hold it."""
        event = group.event(sequence, finish=finish, error=error)
        self.retire(sequence, group, was_late=finish is FinishReason.DEADLINE)
        return event

    def retire(self, sequence: Sequence, group: SequenceGroup, was_late: bool = False) -> None:
        """A live sequence has had its last event. was_late: its deadline passed."""
        if sequence.status is SequenceStatus.WAITING:
            sequence.move_to(SequenceStatus.ENDED)
        else:
            self._homes[group.key].drop(sequence)
        if not group.live:
            self._end_request(group, was_late)
        self._may_fit = True

    def _end_request(self, group: SequenceGroup, was_late: bool) -> None:
        # A late request was cut short: overload would look like short answers.
        if group.admitted_s is not None and not was_late:
            self._throughput.request_ended(group.num_tokens, group.num_known_tokens)
        if group in self.queue:
            self.queue.remove(group)
        self._homes.pop(group.key, None)
        self.queue.end_request(group.request.caller)
        self.poison_isolation.clear(group.key)
        del self.groups[group.key]

    # Admission

    def _late(self, group: SequenceGroup, tokens_ahead: int, now: float, fits: bool) -> RequestError | None:
        """The refusal of a request whose deadline passed, or would before its answer is complete."""
        if group.request.deadline_s is None:
            return None
        if group.request.deadline_s <= now:
            return DeadlinePassed("the caller's time limit passed")
        answer_s = self._answer_s(group, tokens_ahead, fits)
        if answer_s is None or now + answer_s <= group.request.deadline_s:
            return None
        problem = f"the answer would take about {answer_s:.1f} s, longer than its deadline"
        return _overloaded(problem, answer_s / 2)

    def _answer_s(self, group: SequenceGroup, tokens_ahead: int, fits: bool) -> float | None:
        """Predicted time until the answer is complete, or begins if few sequences run; None = unknown."""
        running = [sequence for key in self._homes for sequence in self.groups[key].live]
        if len(running) < _MANY_RUNNING:
            return None if fits else self._throughput.seconds_for(tokens_ahead)
        tokens = tokens_ahead + group.num_tokens
        # Each computes the rest of its prompt, and gets a token per step, so at most as many as this request.
        for sequence in running:
            known = len(sequence.token_ids)
            most = min(group.request.stop.max_tokens, max(0, sequence.max_positions - known))
            tokens += max(0, known - sequence.computed) + most
        answer_s = self._throughput.seconds_for(tokens)
        return None if answer_s is None else _MARGIN * answer_s

    def _full(self, config: SchedulerConfig) -> Overloaded | None:
        """The refusal of the latest request, which would wait, if the queue was full before it."""
        num_others = len(self.queue) - 1
        num_tokens = self.queue.num_tokens
        tokens_fit = num_others == 0 or num_tokens <= config.max_queue_tokens
        if num_others < config.max_queue and tokens_fit:
            return None
        problem = f"{num_others} requests are waiting, with this one of {num_tokens} tokens"
        return _overloaded(problem, self._throughput.seconds_for(num_tokens // 2))

    def lone_at(self, scheduler: RequestScheduler) -> str | None:
        """The only request that this replica may compute now; None = all of its own."""
        lone = self.poison_isolation.lone
        return lone if lone is not None and self._homes.get(lone) is scheduler else None

    def admit(self, now: float) -> None:
        """Admit waiting requests, in their order, until the first that fits nowhere."""
        while assignment := self._next_assignment(now):
            self._start(*assignment, now)

    def _next_assignment(self, now: float) -> tuple[SequenceGroup, RequestScheduler] | None:
        """The next waiting request, and the replica that takes it; None if it fits nowhere."""
        if not self._may_fit:
            return None
        schedulers = [s for s in self._schedulers if s.may_admit and self.lone_at(s) is None]
        if not schedulers:
            return None
        group = self._next_group(schedulers, now)
        if group is not None:
            tokens = {s: s.tokens_with(group) for s in self._allowed(group, schedulers)}
            places = {s: num_tokens for s, num_tokens in tokens.items() if num_tokens is not None}
            if places:
                return group, min(places, key=places.__getitem__)
        self._may_fit = False
        return None

    def _next_group(self, schedulers: list[RequestScheduler], now: float) -> SequenceGroup | None:
        """The lone suspect if it can run, else the queue's first that is no suspect."""
        lone = self.groups.get(self.poison_isolation.lone or "")
        if lone is not None and lone in self.queue and self._allowed(lone, schedulers):
            return lone
        return self.queue.first(now, self.poison_isolation.suspects)

    def _allowed(self, group: SequenceGroup, schedulers: list[RequestScheduler]) -> list[RequestScheduler]:
        """Where the request may run: a lone suspect on the replica that died with it, or idle ones."""
        own = group.replica
        is_gone = all(s.config.replica != own for s in self._schedulers)
        if is_gone or group.key != self.poison_isolation.lone:
            return schedulers
        return [s for s in schedulers if s.config.replica == own or s.tokens_left == 0]

    def _start(self, group: SequenceGroup, scheduler: RequestScheduler, now: float) -> None:
        self.queue.remove(group)
        self._homes[group.key] = scheduler
        is_first_time = group.admitted_s is None
        group.place(scheduler.config.replica, now)
        scheduler.admit(group)
        if is_first_time:
            self.queue.charge(group.request.caller, group.sequences[0].remaining)

    def give_back(self, groups: Iterable[SequenceGroup]) -> None:
        """Requests that have no running sequence left wait for another replica."""
        groups = list(groups)
        for group in groups:
            del self._homes[group.key]
        self.queue.give_back(groups)
        self.retry_admission()

    # Computing

    def step_scheduled(self, now: float) -> None:
        """A replica schedules a step while it has none in flight."""
        if not any(scheduler.is_busy for scheduler in self._schedulers):
            self._throughput.started(now)

    def step_committed(self, num_tokens: int, now: float) -> None:
        is_empty = not any(scheduler.is_busy for scheduler in self._schedulers)
        self._throughput.committed(num_tokens, now, pipeline_empty=is_empty)

    def token_drawn(self, group: SequenceGroup) -> None:
        """A sequence of this request has one token more."""
        self.queue.charge(group.request.caller, 1)
        if not self.poison_isolation.watches(group.key):
            return
        if all(len(s.token_ids) > s.loss_mark for s in group.live):
            self.poison_isolation.clear(group.key)
            self.retry_admission()

    def record_loss(self, in_flight: Iterable[str], failed: Set[Hashable]) -> list[SequenceEvent]:
        """Ranks failed with steps of these requests in flight. The culprit fails, if it is certain."""
        open_requests = self.groups.keys() & set(in_flight)
        culprit = self.poison_isolation.record_loss(open_requests, failed)
        self.retry_admission()
        if culprit is None:
            return []
        return self.fail_request(self.groups[culprit], "a stage died each time this request was computed")


def _overloaded(problem: str, retry_after_s: float | None) -> Overloaded:
    retry_after_s = 1.0 if retry_after_s is None else retry_after_s
    return Overloaded(problem, min(MAX_RETRY_S, max(MIN_RETRY_S, retry_after_s)))
