"""Which requests are refused.

A request is refused when it is submitted: with InvalidRequest if it could not run on an empty server; with
Overloaded, which says after how many seconds to try again, if too much is waiting already or if its deadline would
pass before its answer is complete.

A *new client* is the request of a caller who has no other: for these the queue has as many places again. So a
caller who fills the queue keeps out nobody but itself, and the queue has a bound all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ppserve.core.request import Request, context_problem
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.fairness import FairQueue
from ppserve.core.scheduling.sequence import Sequence, SequenceGroup
from ppserve.core.scheduling.throughput import Throughput
from ppserve.errors import InvalidRequest, Overloaded, Violation

MIN_RETRY_S, MAX_RETRY_S = 0.1, 30.0
_MANY_RUNNING = 8
# Under overload all who are admitted are as late as the prediction allows. So it must allow for its error.
_MARGIN = 1.25
# Predictions that differ by less are the same: then the few tokens by which prompts differ do not matter.
_NEAR = 1.01
# A request that was too late makes those that ask for as much too late for `_HOLDS_S`. The prediction is made anew
# after `_FRESH_S`, and forgotten after `_REMEMBERED_S`.
_HOLDS_S, _FRESH_S, _REMEMBERED_S = 0.05, 0.02, 1.0


class TooLate(Overloaded):
    """The answer would not be complete by the request's deadline.

    new_tokens, priority: the request's. came_s: when it came. end_s: when a request of as many new tokens or more,
    with the shortest prompt and of no higher priority, would be complete; as of `now`. All on the head's clock.
    """

    def __init__(
        self, answer_s: float, shortest_s: float, new_tokens: int, priority: int, came_s: float, now: float
    ) -> None:
        problem = f"the answer would take about {answer_s:.1f} s, longer than its deadline"
        super().__init__(problem, min(MAX_RETRY_S, max(MIN_RETRY_S, answer_s / 2)))
        self.new_tokens, self.priority, self.came_s, self.now = new_tokens, priority, came_s, now
        self.end_s = now + _NEAR * _MARGIN * shortest_s

    def as_of(self, now: float, others: Callable[[], LoadEstimate]) -> TooLate | None:
        """The same reason now; None if it no longer counts."""
        if now <= self.now + _FRESH_S:
            return self
        if now > self.came_s + _REMEMBERED_S:
            return None
        there, new = others(), self.new_tokens
        load = there.tokens_beside(new, self.priority)
        shortest_s = None if load is None else there.throughput.seconds_to_end(1 + new + load, new)
        if shortest_s is None:
            return None
        return TooLate(shortest_s, shortest_s, new, self.priority, self.came_s, now)


@dataclass(frozen=True, slots=True)
class LoadEstimate:
    """What would compute beside a request that came now."""

    running: Collection[Sequence]
    queue: FairQueue
    throughput: Throughput

    def tokens_beside(self, new: int, priority: int, new_client: bool = False) -> int | None:
        """The tokens that others compute until a request has its `new` ones.

        A new client preempts requests of a caller who has several running (`preemption`), so it waits for the
        turn of each caller at most. Where no caller has, it may wait as long as any other.

        All that run get a token a step, so until then each of them gets at most as many, after what is left of its
        prompt. Where few run, one more makes all of them together faster, and the prediction would be too long:
        then it is not made.
        """
        if len(self.running) < _MANY_RUNNING:
            return None
        tokens = self.queue.tokens_ahead(priority, takes_turns=new_client and self.some_caller_has_several)
        for sequence in self.running:
            known = len(sequence.token_ids)
            tokens += max(0, known - sequence.computed) + min(new, max(0, sequence.max_positions - known))
        return tokens

    @property
    def some_caller_has_several(self) -> bool:
        caller_of = {sequence.request.id: sequence.request.caller for sequence in self.running}
        return len(set(caller_of.values())) < len(caller_of)


@dataclass(frozen=True, slots=True)
class Refusals:
    """Refusals that hold for requests whose prompts are not known yet. full: of all but new clients. full_for_all:
    of new clients too. late: of those that would be at least as late as the request that it refused, but not of
    new clients."""

    full: Overloaded | None = None
    full_for_all: Overloaded | None = None
    late: TooLate | None = None

    def of_request(self, request: Request, now: float, new_client: bool) -> Overloaded | None:
        """Of this one; None if it may be admitted, or may wait."""
        return self.of(request.stop.max_tokens, request.priority, request.deadline_s, now, new_client)

    def of(
        self, new_tokens: int, priority: int, deadline_s: float | None, now: float, new_client: bool
    ) -> Overloaded | None:
        """Of a request of at least so many new tokens; None if it may be admitted, or may wait."""
        if new_client:
            return self.full_for_all
        late = self.late
        if self.full is not None or late is None or deadline_s is None or now > late.now + _HOLDS_S:
            return self.full
        too_late = new_tokens >= late.new_tokens and priority <= late.priority and late.end_s > deadline_s
        return late if too_late else None


def worst_case_blocks(num_prompt: int, num_positions: int, num_sequences: int, block_size: int) -> int:
    """The most KV blocks that a request can need. Its sequences share the prompt's full blocks."""
    shared = (num_prompt - 1) // block_size if num_sequences > 1 else 0
    return shared + num_sequences * (-(-num_positions // block_size) - shared)


def refuse_impossible(request: Request, config: SchedulerConfig, num_blocks: int) -> None:
    """Raises InvalidRequest, with all reasons, for a request that could not run on an empty server."""
    num_prompt, max_tokens = len(request.prompt_ids), request.stop.max_tokens
    num_sequences = request.num_sequences if request.resume_index is None else 1
    violations = []
    if num_prompt == 0:
        violations.append(Violation("prompt", "has no tokens"))
    if len(request.resume_ids) > max_tokens:
        violations.append(Violation("resume.generated_token_ids", "more tokens than stop.max_tokens"))
    if problem := context_problem(num_prompt, max_tokens, config.max_model_len):
        violations.append(Violation("prompt", problem))
    if not 1 <= num_sequences <= config.max_num_seqs:
        problem = f"{num_sequences} is not within 1 .. {config.max_num_seqs}"
        violations.append(Violation("sampling.n", problem))
    if not violations:
        positions = max(num_prompt, num_prompt + max_tokens - 1)
        needed = worst_case_blocks(num_prompt, positions, num_sequences, config.block_size)
        if needed > num_blocks:
            problem = f"needs {needed} KV blocks, the server has {num_blocks}"
            violations.append(Violation("stop.max_tokens", problem))
    if violations:
        raise InvalidRequest(violations)


def too_late(request: Request, others: Callable[[], LoadEstimate], now: float, new_client: bool) -> TooLate | None:
    """Why a request is refused whose answer would not be complete by its deadline."""
    if request.deadline_s is None:
        return None
    there, new = others(), request.stop.max_tokens
    load = there.tokens_beside(new, request.priority, new_client)
    if load is None:
        return None
    own = request.num_sequences * (len(request.prompt_ids) + new)
    answer_s = there.throughput.seconds_to_end(own + load, new)
    if answer_s is None or now + _MARGIN * answer_s <= request.deadline_s:
        return None
    shortest_s = there.throughput.seconds_to_end(1 + new + load, new) or 0.0
    return TooLate(answer_s, shortest_s, new, request.priority, now, now)


def refusal_by_number(
    num_waiting: int, num_tokens: int, throughput: Throughput, config: SchedulerConfig, new_client: bool
) -> Overloaded | None:
    """Why no further request may wait beside `num_waiting` with `num_tokens`; None if it may."""
    if num_waiting < config.max_queue * (1 + new_client):
        return None
    return Overloaded(f"{num_waiting} requests are waiting", _retry_after_s(num_tokens, throughput))


def refusals_by_number(
    queue: FairQueue, throughput: Throughput, config: SchedulerConfig, late: TooLate | None
) -> Refusals:
    """Where no replica has room for any request."""
    known = len(queue), queue.num_tokens, throughput, config
    full, full_for_all = (refusal_by_number(*known, new_client=new_client) for new_client in (False, True))
    return Refusals(full, full_for_all, late)


def _retry_after_s(num_tokens: int, throughput: Throughput) -> float:
    """When half of what waits is computed."""
    retry_s = throughput.seconds_for(num_tokens // 2)
    return min(MAX_RETRY_S, max(MIN_RETRY_S, 1.0 if retry_s is None else retry_s))


def refuse_overload(
    group: SequenceGroup, load: LoadEstimate, config: SchedulerConfig, now: float, new_client: bool
) -> None:
    """Raises Overloaded when `group`, the latest in the queue, may not wait.

    The bound on tokens does not apply to a request that is alone in the queue, however long it is.
    """
    queue, throughput = load.queue, load.throughput
    num_before, tokens_before = len(queue) - 1, queue.num_tokens - group.num_tokens
    if refusal := refusal_by_number(num_before, tokens_before, throughput, config, new_client):
        raise refusal
    retry_after_s = _retry_after_s(tokens_before, throughput)
    if num_before and queue.num_tokens > config.max_queue_tokens * (1 + new_client):
        raise Overloaded(f"{tokens_before} tokens are waiting", retry_after_s)
    deadline_s = group.request.deadline_s
    if deadline_s is not None:
        ahead = queue.tokens_ahead(group.priority, new_client and load.some_caller_has_several)
        wait_s = throughput.seconds_for(ahead - group.num_tokens) or 0.0
        if now + wait_s > deadline_s:
            raise Overloaded(f"the wait is about {wait_s:.1f} s, longer than the deadline", retry_after_s)
