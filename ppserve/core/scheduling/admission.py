"""Admission: a request that is submitted is admitted, waits or is refused.

It is refused with InvalidRequest if it could not run on an empty server. It is refused with Overloaded, which says
when to try again, if the queue is full, or if its deadline would pass before its answer is complete, by the
measured throughput.

The first request of a caller that has no other finds a queue of twice the size. So a caller that fills the queue
keeps out nobody but itself, and the queue is bounded all the same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from ppserve.core.request import Request, context_problem
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.sequence import Sequence, SequenceGroup
from ppserve.errors import InvalidRequest, Violation

MIN_RETRY_S, MAX_RETRY_S = 0.1, 30.0
# With fewer running sequences one more makes all of them together faster, so no answer's time is predicted.
_MANY_RUNNING = 8
# Predicted times are multiplied by this: under overload, admitted requests are as late as the prediction allows.
_MARGIN = 1.25

HALF_LIFE_S = 10.0
MIN_EVIDENCE_S = 0.05
MEMORY_OF_ENDS = 0.98
# The largest share of the throughput that requests admitted later are assumed to take. More would refuse bursts.
MAX_LATER_SHARE = 0.5


class Verdict(StrEnum):
    ADMIT = "admit"
    WAIT = "wait"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class AdmissionDecision:
    """What becomes of a submitted request. problem, retry_after_s: of a refusal."""

    verdict: Verdict
    problem: str = ""
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """What a submitted request finds. tokens_ahead: of the waiting requests that go before it."""

    running: Collection[Sequence]
    num_waiting: int
    tokens_waiting: int
    tokens_ahead: int
    throughput: Throughput


def decide(
    group: SequenceGroup, load: QueueLoad, config: SchedulerConfig, now: float, *, fits: bool, is_only_one: bool
) -> AdmissionDecision:
    """Admit, wait or refuse. fits: it is next, and a replica has room. is_only_one: its caller has no other."""
    if group.request.deadline_s is not None:
        answer_s = _answer_s(group, load, fits)
        if answer_s is not None and now + answer_s > group.request.deadline_s:
            problem = f"the answer would take about {answer_s:.1f} s, longer than its deadline"
            return _refuse(problem, answer_s / 2)
    if fits:
        return AdmissionDecision(Verdict.ADMIT)
    queues = 2 if is_only_one else 1
    half_of_queue_s = load.throughput.seconds_for(load.tokens_waiting // 2)
    if load.num_waiting >= config.max_queue * queues:
        return _refuse(f"{load.num_waiting} requests are waiting", half_of_queue_s)
    if load.num_waiting and load.tokens_waiting + group.num_tokens > config.max_queue_tokens * queues:
        return _refuse(f"{load.tokens_waiting} tokens are waiting", half_of_queue_s)
    return AdmissionDecision(Verdict.WAIT)


def _refuse(problem: str, retry_after_s: float | None) -> AdmissionDecision:
    retry_after_s = 1.0 if retry_after_s is None else retry_after_s
    return AdmissionDecision(Verdict.REFUSE, problem, min(MAX_RETRY_S, max(MIN_RETRY_S, retry_after_s)))


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
    answer_s = load.throughput.seconds_to_end(tokens, new)
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
    """Tokens computed (prompt and decode alike), and requests admitted, per second with steps in flight; idle time
    does not count.

    Requests reserve tokens for their max_tokens and mostly end sooner, so the share that they use is measured too.
    Old measurements lose weight, so that predictions follow the load.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._admitted = 0.0
        self._prompt_tokens = 0.0
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
        self._admitted *= fade
        self._prompt_tokens *= fade
        self._seconds = self._seconds * fade + elapsed
        self._since = None if pipeline_empty else now

    def request_admitted(self, prompt_tokens: int) -> None:
        """prompt_tokens: to be computed before its first new one."""
        self._admitted += 1.0
        self._prompt_tokens += prompt_tokens

    def request_ended(self, reserved_tokens: int, used_tokens: int) -> None:
        """An admitted request ended, not because it was late. used_tokens: of the reserved ones."""
        self._reserved_tokens = self._reserved_tokens * MEMORY_OF_ENDS + reserved_tokens
        self._used_tokens = self._used_tokens * MEMORY_OF_ENDS + used_tokens

    def seconds_for(self, reserved_tokens: int) -> float | None:
        """Predicted time for requests that reserve so many tokens; None while too little has been measured."""
        if self._seconds < MIN_EVIDENCE_S or self._tokens <= 0:
            return None
        return reserved_tokens * self._used_share * self._seconds / self._tokens

    def seconds_to_end(self, reserved_tokens: int, new_tokens: int) -> float | None:
        """Predicted time until a request that is admitted now has computed its `new_tokens`, one in a step.

        reserved_tokens: of it, and of what computes beside it already. Those who are admitted after it compute
        beside it too: their prompts, and new tokens in half of its steps on average.
        """
        seconds = self.seconds_for(reserved_tokens)
        if seconds is None:
            return None
        later = self._prompt_tokens + self._admitted * new_tokens * self._used_share / 2
        return seconds / (1.0 - min(MAX_LATER_SHARE, later / self._tokens))

    @property
    def _used_share(self) -> float:
        return self._used_tokens / self._reserved_tokens if self._reserved_tokens else 1.0
