"""Admission: in which order waiting requests are admitted, and which requests are refused.

A submitted request is admitted, waits or is refused (`refusal`). It is refused with InvalidRequest if it could not
run on an empty server. It is refused with Overloaded, which says when to try again, if the queue is full, or if
its deadline would pass before its answer is complete, by the measured throughput. The first request of a caller
that has no other finds a queue of twice the size. So a caller that fills the queue keeps out nobody but itself.

Waiting requests that a lost or drained replica gave back go first, in the order of their first admission. Others
are ordered by

1. priority, higher first. Each priority class is represented by its first request in the order of 2 and 3, whose
   class rises by one for every `aging_s` seconds that it has waited. So the lowest class is served too,
   and a long line of one caller's own requests gains nothing;
2. the tokens that its caller will have been served after its answer, fewest first (virtual token counters, Sheng
   et al., "Fairness in Serving Large Language Models", arXiv 2401.00588); a caller that was idle starts at the
   smallest counter of the callers with requests, so being idle earns no advantage;
3. arrival.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass
from itertools import chain

from ppserve.core.request import Request, context_problem
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.sequence import Sequence, SequenceGroup
from ppserve.errors import InvalidRequest, Overloaded, Violation

MIN_RETRY_S, MAX_RETRY_S = 0.1, 30.0
# With fewer running sequences one more makes all of them together faster, so no answer's time is predicted.
_MANY_RUNNING = 8
# Predicted times are multiplied by this: under overload, requests that are admitted later take half of the steps,
# and admitted requests are as late as the prediction allows.
_MARGIN = 2.5

MAX_IDLE_CALLERS = 1024
AGING_S = 10.0

HALF_LIFE_S = 10.0
MIN_EVIDENCE_S = 0.05
MEMORY_OF_ENDS = 0.98


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """What a submitted request finds."""

    running: Collection[Sequence]
    num_waiting: int
    tokens_waiting: int
    tokens_ahead: int
    """Of the waiting requests that go before it."""
    throughput: Throughput


def refusal(
    group: SequenceGroup, load: QueueLoad, config: SchedulerConfig, now: float, *, fits: bool, is_only_one: bool
) -> Overloaded | None:
    """Why a request is refused; None if it is admitted or waits. fits: it is next, and a replica has room.
    is_only_one: its caller has no other."""
    if group.request.deadline_s is not None:
        answer_s = _answer_s(group, load, fits)
        if answer_s is not None and now + answer_s > group.request.deadline_s:
            problem = f"the answer would take about {answer_s:.1f} s, longer than its deadline"
            return _overloaded(problem, answer_s / 2)
    if fits:
        return None
    queues = 2 if is_only_one else 1
    half_of_queue_s = load.throughput.seconds_for(load.tokens_waiting // 2)
    if load.num_waiting >= config.max_queue * queues:
        return _overloaded(f"{load.num_waiting} requests are waiting", half_of_queue_s)
    if load.num_waiting and load.tokens_waiting + group.num_tokens > config.max_queue_tokens * queues:
        return _overloaded(f"{load.tokens_waiting} tokens are waiting", half_of_queue_s)
    return None


def _overloaded(problem: str, retry_after_s: float | None) -> Overloaded:
    retry_after_s = 1.0 if retry_after_s is None else retry_after_s
    return Overloaded(problem, min(MAX_RETRY_S, max(MIN_RETRY_S, retry_after_s)))


def _answer_s(group: SequenceGroup, load: QueueLoad, fits: bool) -> float | None:
    """Predicted time until the answer is complete; until it begins where few sequences run; None = unknown.

    Every running sequence gets a token per step. So until the request has its own tokens, each of the others gets
    at most as many, after what is left of its prompt.
    """
    new = group.request.stop.max_tokens
    if len(load.running) < _MANY_RUNNING:
        return None if fits else load.throughput.seconds_for(load.tokens_ahead)
    tokens = load.tokens_ahead + group.num_tokens
    for sequence in load.running:
        known = len(sequence.token_ids)
        tokens += max(0, known - sequence.computed) + min(new, max(0, sequence.max_positions - known))
    answer_s = load.throughput.seconds_for(tokens)
    return None if answer_s is None else _MARGIN * answer_s


def worst_case_blocks(num_prompt: int, num_positions: int, num_sequences: int, block_size: int) -> int:
    """The most KV blocks that a request can need. Its sequences share the prompt's full blocks."""
    shared = (num_prompt - 1) // block_size if num_sequences > 1 else 0
    return shared + num_sequences * (-(-num_positions // block_size) - shared)


def check_possible(request: Request, config: SchedulerConfig, num_blocks: int) -> None:
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


class Throughput:
    """Tokens computed (prompt and decode alike) per second with steps in flight; idle time does not count.

    Requests reserve tokens for their max_tokens and mostly end sooner, so the share that they use is measured too.
    Old measurements lose weight, so that predictions follow the load.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._since: float | None = None
        self._reserved_tokens = 0.0
        self._used_tokens = 0.0

    def started(self, now: float) -> None:
        """A step was scheduled while the pipeline was empty."""
        self._since = now

    def committed(self, num_tokens: int, now: float, *, pipeline_empty: bool) -> None:
        """A step has returned."""
        elapsed = max(0.0, now - self._since) if self._since is not None else 0.0
        fade = 0.5 ** (elapsed / HALF_LIFE_S)
        self._tokens = self._tokens * fade + num_tokens
        self._seconds = self._seconds * fade + elapsed
        self._since = None if pipeline_empty else now

    def request_ended(self, reserved_tokens: int, used_tokens: int) -> None:
        """An admitted request ended, not because it was late. used_tokens: of the reserved ones."""
        self._reserved_tokens = self._reserved_tokens * MEMORY_OF_ENDS + reserved_tokens
        self._used_tokens = self._used_tokens * MEMORY_OF_ENDS + used_tokens

    def seconds_for(self, reserved_tokens: int) -> float | None:
        """Predicted time for requests that reserve so many tokens; None while too little has been measured."""
        if self._seconds < MIN_EVIDENCE_S or self._tokens <= 0:
            return None
        used_share = self._used_tokens / self._reserved_tokens if self._reserved_tokens else 1.0
        return reserved_tokens * used_share * self._seconds / self._tokens


@dataclass(slots=True)
class _Account:
    """A caller: its virtual token counter, and how many requests it has."""

    served: float = 0.0
    num_live: int = 0


class FairQueue:
    """Waiting requests in the module's order, and the accounts of all callers. `now` is in seconds."""

    def __init__(self, aging_s: float = AGING_S) -> None:
        self._aging_s = aging_s
        self._given_back: dict[str, SequenceGroup] = {}
        self._arrived: dict[str, SequenceGroup] = {}  # the oldest first
        self._accounts: dict[str, _Account] = {}
        self._floor = 0.0

    def __len__(self) -> int:
        return len(self._given_back) + len(self._arrived)

    def __contains__(self, entry: SequenceGroup) -> bool:
        return entry.key in self._given_back or entry.key in self._arrived

    def push(self, entry: SequenceGroup) -> None:
        """Append a request."""
        account = self._accounts.setdefault(entry.request.caller, _Account())
        if account.num_live == 0:
            self._raise_floor()
            account.served = max(account.served, self._floor)
        account.num_live += 1
        self._arrived[entry.key] = entry

    def give_back(self, entries: Iterable[SequenceGroup]) -> None:
        """Put requests that were admitted before to the front."""
        entries = sorted([*self._given_back.values(), *entries], key=lambda entry: entry.admitted_s or 0.0)
        self._given_back = {entry.key: entry for entry in entries}

    def first(self, now: float, suspects: Container[str] = ()) -> SequenceGroup | None:
        """The request to admit next, which stays in the queue until `remove`. suspects: they are passed over."""
        for entry in self._given_back.values():
            if entry.key not in suspects:
                return entry
        # A class is raised by the request whose turn it is, not by its oldest, which may be behind newer ones.
        turns: dict[int, SequenceGroup] = {}
        for entry in self._first_of_callers():
            other = turns.setdefault(entry.request.priority, entry)
            if self._served_after(entry) < self._served_after(other):
                turns[entry.request.priority] = entry

        def rank(entry: SequenceGroup) -> tuple[float, float, float]:
            raised = entry.request.priority + max(0.0, now - entry.submitted_s) // self._aging_s
            return -raised, self._served_after(entry), entry.submitted_s

        return min(turns.values(), key=rank, default=None)

    def _first_of_callers(self) -> Collection[SequenceGroup]:
        """The oldest request of each caller in each class."""
        firsts: dict[tuple[int, str], SequenceGroup] = {}
        for entry in self._arrived.values():
            firsts.setdefault((entry.request.priority, entry.request.caller), entry)
        return firsts.values()

    def _served_after(self, entry: SequenceGroup) -> float:
        """The tokens that its caller will have been served after this answer."""
        return self._accounts[entry.request.caller].served + entry.num_tokens

    def remove(self, entry: SequenceGroup) -> None:
        """Take a request out of the queue. It counts as live for its caller until `end_request`."""
        if self._given_back.pop(entry.key, None) is None:
            del self._arrived[entry.key]

    @property
    def num_tokens(self) -> int:
        """The most tokens of all waiting requests."""
        return sum(entry.num_tokens for entry in chain(self._given_back.values(), self._arrived.values()))

    def tokens_ahead(self, priority: int, is_only_one: bool) -> int:
        """The most tokens of the waiting requests before a new one of `priority`. is_only_one: its caller has no
        other, so of its class only the first of each caller goes before it."""
        own = self._first_of_callers() if is_only_one else self._arrived.values()
        ahead = [entry for entry in own if entry.request.priority == priority]
        ahead += [entry for entry in self._arrived.values() if entry.request.priority > priority]
        return sum(entry.num_tokens for entry in chain(self._given_back.values(), ahead))

    def is_idle(self, caller: str) -> bool:
        """Whether a caller has no live request."""
        account = self._accounts.get(caller)
        return account is None or account.num_live == 0

    def charge(self, caller: str, num_tokens: int) -> None:
        """Add tokens to the counter of a caller with live requests."""
        self._accounts[caller].served += num_tokens

    def end_request(self, caller: str) -> None:
        """One of a caller's live requests ended. Of too many idle callers, the one served least is forgotten."""
        self._raise_floor()
        account = self._accounts[caller]
        account.num_live -= 1
        assert account.num_live >= 0, caller
        idle = [other for other, account in self._accounts.items() if not account.num_live]
        if len(idle) > MAX_IDLE_CALLERS:
            del self._accounts[min(idle, key=lambda other: self._accounts[other].served)]

    def _raise_floor(self) -> None:
        """Raise the counter at which idle callers start to the smallest of the callers with live requests."""
        self._floor = max(self._floor, min((a.served for a in self._accounts.values() if a.num_live), default=0.0))
