"""The request queue: all open requests, those that wait, and which replica takes the next one.

All replicas share the queue, fairness, admission, deadlines and the isolation of poison requests. Each replica has
its own blocks, slots and steps (`scheduler`). The queue calls the schedulers, which do not know it.

Laws

- A submitted request is admitted, waits or is refused: with InvalidRequest if it does not fit an empty server,
  with Overloaded if the queue is full or its answer is predicted to miss its deadline.
- Waiting requests are admitted in `FairQueue`'s order, until the first that fits nowhere.
- A request goes to the replica with room that then has the fewest tokens left to compute. Tokens that this replica
  has cached do not count. So a cached prefix attracts requests, but not to a replica that is much busier.
- Requests that a replica gives back keep their tokens and are computed again, before all others.
- Suspects run alone (`PoisonIsolation`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Set

from ppserve.core.plan import StepPlan, StepResult
from ppserve.core.request import FinishReason, Request
from ppserve.core.scheduling.block_manager import worst_case_blocks
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.fair_queue import FairQueue
from ppserve.core.scheduling.poison_isolation import PoisonIsolation
from ppserve.core.scheduling.scheduler import Scheduler
from ppserve.core.scheduling.sequence import EndCause, Sequence, SequenceEvent, SequenceGroup, TextRule
from ppserve.core.scheduling.throughput import Throughput
from ppserve.core.scheduling.token_filter import ImmediateMasks, MaskSource, TokenFilter
from ppserve.errors import DeadlinePassed, InvalidRequest, Overloaded, RequestError, RequestFailed, Violation

MIN_RETRY_S, MAX_RETRY_S = 0.1, 30.0
# With fewer running sequences than this, one more raises the throughput, so no answer's time is predicted.
_MANY_RUNNING = 8
# A factor on predicted times. Under overload, requests that are admitted later take half of the steps.
_MARGIN = 2.5


def check_possible(request: Request, config: SchedulerConfig, num_blocks: int) -> None:
    """Raise InvalidRequest if a request does not fit a server of `num_blocks` KV blocks even when it is empty."""
    num_prompt = len(request.prompt_ids)
    positions = max(num_prompt, num_prompt + request.stop.max_tokens - 1)
    needed = worst_case_blocks(num_prompt, positions, request.num_sequences, config.block_size)
    if needed > num_blocks:
        problem = f"needs {needed} KV blocks, the server has {num_blocks}"
        raise InvalidRequest([Violation("stop.max_tokens", problem)])


class RequestQueue:
    """All open requests, by id in `groups`. `now` is the head's monotonic clock, in seconds."""

    def __init__(self, new_masks: Callable[[TokenFilter], MaskSource] = ImmediateMasks) -> None:
        """new_masks: makes the source of a request's masks."""
        self.new_masks = new_masks
        self.groups: dict[str, SequenceGroup] = {}
        self.queue = FairQueue()
        self.poison_isolation = PoisonIsolation()
        self._throughput = Throughput()
        self._schedulers: list[Scheduler] = []
        self._homes: dict[str, Scheduler] = {}
        self._next_deadline_s = math.inf  # no open request has an earlier deadline
        # `_num_releases` when the first waiting request was found to fit nowhere: it still does not while the
        # number is the same. None: it may fit now.
        self._releases_at_refusal: int | None = None
        self._next_sequence_id = 0

    # Replicas

    def add_scheduler(self, scheduler: Scheduler) -> None:
        self._schedulers.append(scheduler)
        self._retry_admission()

    def remove_scheduler(self, scheduler: Scheduler) -> None:
        """Remove the scheduler of a replica that will not come back. It has given its requests back."""
        self._schedulers.remove(scheduler)
        self._retry_admission()

    @property
    def num_waiting(self) -> int:
        """The number of requests that no replica computes."""
        return len(self.queue)

    @property
    def _num_releases(self) -> int:
        return sum(scheduler.num_releases for scheduler in self._schedulers)

    def _retry_admission(self) -> None:
        """Note that the next waiting request may fit now: it is another one, or may go to more replicas."""
        self._releases_at_refusal = None

    # Requests

    def submit(
        self,
        request: Request,
        now: float,
        token_filter: TokenFilter | None = None,
        text_rule: TextRule | None = None,
    ) -> None:
        """Admit or queue a request. Raises InvalidRequest, DeadlinePassed or Overloaded. token_filter: the rule
        that the request's answers must obey. text_rule: decides whether an answer's text ends it."""
        config = self._schedulers[0].config
        num_blocks = min(scheduler.num_blocks for scheduler in self._schedulers)
        check_possible(request, config, num_blocks)
        self.admit(now)
        masks = None if token_filter is None else self.new_masks(token_filter)
        group = SequenceGroup(request, self._next_sequence_id, config, now, masks, text_rule)
        tokens_ahead = self.queue.tokens_ahead(request)
        self.queue.push(group)
        self._retry_admission()
        assignment = self._next_assignment(now)
        fits = assignment is not None and assignment[0] is group
        refusal = self._deadline_refusal(group, tokens_ahead, now, fits)
        if refusal is None and not fits:
            refusal = self._full_refusal(config)
        if refusal is not None:
            self.queue.remove(group)
            self.queue.end_request(request.caller)
            raise refusal
        self.groups[request.id] = group
        self._next_sequence_id += len(group.sequences)
        if request.deadline_s is not None:
            self._next_deadline_s = min(self._next_deadline_s, request.deadline_s)
        if assignment is not None and fits:
            self._start(*assignment, now)

    def abort(self, request_id: str, reason: FinishReason) -> list[SequenceEvent]:
        """End a request. Nothing happens if it is unknown or has ended."""
        group = self.groups.get(request_id)
        return [] if group is None else self._end_request(group, reason)

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

    def _end_request(self, group: SequenceGroup, cause: EndCause) -> list[SequenceEvent]:
        return [self._end(group, sequence, cause) for sequence in group.live]

    def _end(self, group: SequenceGroup, sequence: Sequence, cause: EndCause) -> SequenceEvent:
        home = self._homes.get(group.key)
        event = group.end(sequence, cause) if home is None else home.end(sequence, cause)
        self._note_end(event)
        return event

    def _note_end(self, event: SequenceEvent) -> None:
        """Note that a sequence has ended. If it was its request's last one, the request has ended too."""
        self._retry_admission()
        group = self.groups.get(event.request_id)
        if group is None or group.live:
            return
        # An overdue request was cut short. If it counted, answers would seem to be short under overload.
        if group.admitted_s is not None and event.finish is not FinishReason.DEADLINE:
            self._throughput.request_ended(group.num_tokens, group.num_known_tokens)
        if group in self.queue:
            self.queue.remove(group)
        self._homes.pop(group.key, None)
        self.queue.end_request(group.request.caller)
        self.poison_isolation.clear(group.key)
        del self.groups[group.key]

    # Admission

    def _deadline_refusal(
        self, group: SequenceGroup, tokens_ahead: int, now: float, fits: bool
    ) -> RequestError | None:
        """Return the refusal of a request whose deadline has passed, or will before its answer is complete."""
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
        """Predict the seconds until the answer is complete, or until it begins if few sequences run. None: there
        is nothing to predict them by, or the answer begins at once."""
        running = [sequence for key in self._homes for sequence in self.groups[key].live]
        if len(running) < _MANY_RUNNING:
            return None if fits else self._throughput.seconds_for(tokens_ahead)
        tokens = tokens_ahead + group.num_tokens
        # Each running sequence computes the rest of its prompt. Then it gets one token per step, as this request
        # does, so meanwhile it gets at most as many as this request.
        for sequence in running:
            known = len(sequence.token_ids)
            most = min(group.request.stop.max_tokens, max(0, sequence.max_positions - known))
            tokens += max(0, known - sequence.computed) + most
        answer_s = self._throughput.seconds_for(tokens)
        return None if answer_s is None else _MARGIN * answer_s

    def _full_refusal(self, config: SchedulerConfig) -> Overloaded | None:
        """Return the refusal of the newest request, which would have to wait, if the queue was full before it."""
        num_others = len(self.queue) - 1
        num_tokens = self.queue.num_tokens
        tokens_fit = num_others == 0 or num_tokens <= config.max_queue_tokens
        if num_others < config.max_queue and tokens_fit:
            return None
        problem = f"{num_others} requests are waiting, with this one of {num_tokens} tokens"
        return _overloaded(problem, self._throughput.seconds_for(num_tokens // 2))

    def _lone_at(self, scheduler: Scheduler) -> str | None:
        """Return the only request that this replica may compute now; None = it may compute all that it has."""
        lone = self.poison_isolation.lone
        return lone if lone is not None and self._homes.get(lone) is scheduler else None

    def admit(self, now: float) -> None:
        """Admit waiting requests, in their order, until one fits nowhere."""
        while assignment := self._next_assignment(now):
            self._start(*assignment, now)

    def _next_assignment(self, now: float) -> tuple[SequenceGroup, Scheduler] | None:
        """Return the next waiting request, and the replica that takes it; None if it fits nowhere."""
        if self._releases_at_refusal == self._num_releases:
            return None
        schedulers = [s for s in self._schedulers if s.may_admit and self._lone_at(s) is None]
        if not schedulers:
            return None
        group = self._next_group(schedulers, now)
        if group is not None:
            loads = {s: s.tokens_left_with(group) for s in self._allowed(group, schedulers)}
            with_room = {s: num_tokens for s, num_tokens in loads.items() if num_tokens is not None}
            if with_room:
                return group, min(with_room, key=with_room.__getitem__)
        self._releases_at_refusal = self._num_releases
        return None

    def _next_group(self, schedulers: list[Scheduler], now: float) -> SequenceGroup | None:
        """Return the suspect that is to run alone, if it can run; else the queue's first request that is no
        suspect."""
        lone = self.groups.get(self.poison_isolation.lone or "")
        if lone is not None and lone in self.queue and self._allowed(lone, schedulers):
            return lone
        return self.queue.first(now, self.poison_isolation.suspects)

    def _allowed(self, group: SequenceGroup, schedulers: list[Scheduler]) -> list[Scheduler]:
        """Return those of the schedulers that may take the request. A suspect that is to run alone goes to the
        replica that was lost with it, or to an idle one."""
        lost = group.replica
        is_gone = all(s.config.replica != lost for s in self._schedulers)
        if is_gone or group.key != self.poison_isolation.lone:
            return schedulers
        return [s for s in schedulers if s.config.replica == lost or s.tokens_left == 0]

    def _start(self, group: SequenceGroup, scheduler: Scheduler, now: float) -> None:
        self.queue.remove(group)
        self._homes[group.key] = scheduler
        is_first_time = group.admitted_s is None
        group.place(scheduler.config.replica, now)
        scheduler.admit(group)
        if is_first_time:
            self.queue.charge(group.request.caller, group.sequences[0].num_pending)  # the prompt, once

    def give_back(self, scheduler: Scheduler) -> frozenset[str]:
        """Close a replica's scheduler. Its requests wait for another replica, or until this one opens again.
        Returns the ids of the requests in flight."""
        given_back = scheduler.give_back()
        for group in given_back.groups:
            del self._homes[group.key]
        self.queue.give_back(given_back.groups)
        self._retry_admission()
        return given_back.in_flight

    # Computing

    def schedule(self, scheduler: Scheduler, now: float) -> StepPlan | None:
        """Return a replica's next step; None when its pipeline is full or nothing is ready."""
        was_busy = self._is_busy
        plan = scheduler.schedule(self._lone_at(scheduler), others_wait=self.num_waiting > 0)
        if plan is not None and not was_busy:
            self._throughput.started(now)
        return plan

    def take_masks(self, scheduler: Scheduler) -> list[SequenceEvent]:
        """Look up the masks that a replica's next steps need; call this before `schedule`. Ends the requests in
        whose answers no token may follow."""
        events = scheduler.take_masks()
        for event in events:
            self._note_end(event)
        return events

    def commit(self, scheduler: Scheduler, result: StepResult, now: float) -> list[SequenceEvent]:
        """Apply the last stage's result of a step. Nothing happens if the step is unknown or of an older epoch."""
        committed = scheduler.commit(result)
        if committed is None:
            return []
        for event in committed.events:
            if event.token_id is not None:
                self._note_token(self.groups[event.request_id])
        for event in committed.events:
            if event.is_terminal:
                self._note_end(event)
        self._throughput.committed(committed.num_tokens, now, pipeline_empty=not self._is_busy)
        return committed.events

    @property
    def _is_busy(self) -> bool:
        return any(scheduler.is_busy for scheduler in self._schedulers)

    def _note_token(self, group: SequenceGroup) -> None:
        """Note that a sequence of this request has one token more."""
        self.queue.charge(group.request.caller, 1)
        if not self.poison_isolation.watches(group.key):
            return
        if all(len(s.token_ids) > s.loss_mark for s in group.live):
            self.poison_isolation.clear(group.key)
            self._retry_admission()

    def end_impossible(self) -> list[SequenceEvent]:
        """Fail the requests that would not fit any replica even if it were empty. With other layers per stage, a
        replica may have fewer KV blocks than when a request was submitted."""
        config = self._schedulers[0].config
        num_blocks = max(scheduler.num_blocks for scheduler in self._schedulers)
        events: list[SequenceEvent] = []
        for group in list(self.groups.values()):
            try:
                check_possible(group.request, config, num_blocks)
            except InvalidRequest:
                problem = "there is no room any more for this request's keys and values"
                events += self._end_request(group, RequestFailed(problem))
        return events

    def record_loss(self, in_flight: Iterable[str], failed: Set[Hashable]) -> list[SequenceEvent]:
        """Note that ranks failed with steps of these requests in flight. If one request is certainly the cause, it
        fails. failed: see `PoisonIsolation.record_loss`."""
        open_requests = self.groups.keys() & set(in_flight)
        culprit = self.poison_isolation.record_loss(open_requests, failed)
        self._retry_admission()
        if culprit is None:
            return []
        problem = "a stage died each time this request was computed"
        return self._end_request(self.groups[culprit], RequestFailed(problem))


def _overloaded(problem: str, retry_after_s: float | None) -> Overloaded:
    retry_after_s = 1.0 if retry_after_s is None else retry_after_s
    return Overloaded(problem, min(MAX_RETRY_S, max(MIN_RETRY_S, retry_after_s)))
