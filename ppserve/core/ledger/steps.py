"""The book of steps: which are in flight, which stages owe a result, when each was sent, and how many bytes moved.

Only the replica writes into it. A step is *in flight* until the last stage has reported it, because only then are
its tokens known. It stays in the book until every stage has reported it.

All times are nanoseconds on the head's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ppserve.core.cost_model import StepSize
from ppserve.core.plan import StepPlan, StepResult, StepStamps

STEP_DEADLINE_NS = 60_000_000_000
"""No step may take longer on a stage."""
_LEAST_DEADLINE_NS = 10_000_000_000
_DEADLINE_FACTOR = 5
"""A step may take so many times as long as its rows at the highest cost per row so far."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """The hidden states of one step between two stages."""

    sender: int
    """The stage that computed them."""
    num_bytes: int
    sending_ns: int
    """How long sending occupied the sender."""
    waited_ns: int
    """The receiver's `transfer`: from when the sender had computed and the receiver was waiting, to the
    arrival."""
    latency_ns: int | None
    """The time from sent to received. None: the receiver was not waiting, so it is not known when they arrived."""


class Step:
    """A step, from when it was sent until every stage has reported it. Only `Steps` writes to it."""

    def __init__(
        self, plan: StepPlan, num_stages: int, woken_ns: int, sent_ns: int, fills_pipeline: bool, fills_slots: bool
    ) -> None:
        self.plan = plan
        self.woken_ns = woken_ns  # when the turn of the engine began that made the step
        self.sent_ns = sent_ns  # when the plan had been sent to all stages
        self.fills_pipeline = fills_pipeline  # whether as many steps were then in flight as there are stages
        self.fills_slots = fills_slots  # whether as many steps were then in flight as there are slots
        self.returned_ns: int | None = None  # when the head had the last stage's result
        self._results: list[StepResult | None] = [None] * num_stages

    @cached_property
    def phase(self) -> str:
        """See `StepPlan.phase`. Like `size` it depends on every slice, and is asked for several times."""
        return self.plan.phase

    @cached_property
    def size(self) -> StepSize:
        """The terms of the step's cost, which are the same on every stage."""
        return StepSize.from_plan(self.plan)

    @property
    def num_tokens(self) -> int:
        return self.size.rows

    @property
    def is_complete(self) -> bool:
        return None not in self._results

    def first_owing(self) -> int:
        """Return the first stage that has not reported the step. The stages after it cannot have begun it."""
        return self._results.index(None)

    def result(self, stage: int) -> StepResult | None:
        return self._results[stage]

    def set_result(self, result: StepResult, now_ns: int) -> None:
        """Record a stage's result. Only `Steps` calls this."""
        self._results[result.stage] = result
        if result.stage == len(self._results) - 1:
            self.returned_ns = now_ns

    def stamps(self, stage: int) -> StepStamps | None:
        result = self._results[stage]
        return None if result is None else result.stamps

    def transfers(self, stage: int) -> Iterator[Transfer]:
        """Return the transfers from and to `stage` whose other end has reported too."""
        for receiver in (stage, stage + 1):
            if 0 < receiver < len(self._results):
                sent, received = self._results[receiver - 1], self._results[receiver]
                if sent is not None and received is not None:
                    yield _transfer(sent, received)


class Steps:
    """The book of the steps of one pipeline (see the module)."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.num_in_flight = 0
        self._steps: dict[int, Step] = {}
        self._progress_ns = 0  # when a stage last reported, or a step was sent while the book was empty
        self._row_ns = 0.0  # the highest time per row that any stage has taken in a step

    def __len__(self) -> int:
        """Return the number of steps that some stage has not reported."""
        return len(self._steps)

    @property
    def fills_pipeline(self) -> bool:
        """Whether as many steps are in flight as there are stages."""
        return self.num_in_flight >= self.num_stages

    def sent(self, plan: StepPlan, woken_ns: int, sent_ns: int, num_slots: int) -> Step:
        """Record a plan that was sent to all stages, and return its step. num_slots: how many steps may be in
        flight."""
        if not self._steps:
            self._progress_ns = sent_ns
        self.num_in_flight += 1
        fills_slots = self.num_in_flight >= num_slots
        step = Step(plan, self.num_stages, woken_ns, sent_ns, self.fills_pipeline, fills_slots)
        self._steps[plan.step_id] = step
        return step

    def reported(self, result: StepResult, now_ns: int) -> Step | None:
        """Record a stage's result, whose stamps must be on the head's clock, and return its step. Return None, and
        change nothing, if the step is not in the book or the stage has reported it before."""
        step = self._steps.get(result.step_id)
        if step is None or result.epoch != step.plan.epoch or step.result(result.stage) is not None:
            return None
        step.set_result(result, now_ns)
        self._progress_ns = now_ns
        if result.stage == self.num_stages - 1:
            self.num_in_flight -= 1
        if step.is_complete:
            del self._steps[result.step_id]
        self._row_ns = max(self._row_ns, result.computed_ns / step.num_tokens)
        return step

    def lost(self) -> None:
        """Forget all steps, because the epoch is lost: none of them will be reported."""
        self._steps.clear()
        self.num_in_flight = 0

    def head_paused(self, now_ns: int) -> None:
        """Start deadlines anew, because the head itself has not run for a while."""
        self._progress_ns = now_ns

    def stuck(self, now_ns: int) -> tuple[int, int] | None:
        """Return the id of the oldest step and the first stage that owes it, if no stage has reported anything for
        longer than that step's deadline; else None."""
        oldest = next(iter(self._steps.values()), None)
        waited_ns = now_ns - self._progress_ns
        # The rows of a step are not counted in every turn: no deadline is shorter than the least.
        if oldest is None or waited_ns <= _LEAST_DEADLINE_NS or waited_ns <= self._deadline_ns(oldest):
            return None
        return oldest.plan.step_id, oldest.first_owing()

    def _deadline_ns(self, step: Step) -> float:
        """Return how long a stage may take for a step. It is STEP_DEADLINE_NS while the cost of a row is
        unknown."""
        if not self._row_ns:
            return STEP_DEADLINE_NS
        return min(STEP_DEADLINE_NS, _LEAST_DEADLINE_NS + _DEADLINE_FACTOR * step.num_tokens * self._row_ns)


def _transfer(sent: StepResult, received: StepResult) -> Transfer:
    out, into = sent.stamps, received.stamps
    return Transfer(
        sender=sent.stage,
        num_bytes=sent.bytes_sent,
        sending_ns=out.sent - out.ended,
        waited_ns=max(0, into.received - max(out.ended, into.awaited)),
        latency_ns=into.received - out.sent if into.awaited <= out.sent else None,
    )
