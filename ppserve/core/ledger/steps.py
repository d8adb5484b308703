"""The one book of steps: what is in flight, who owes a result, when it was sent, which bytes travelled.

The engine writes into it when a plan has gone out and when a stage reports; everybody else reads: the lanes, the
time account, the overheads, the metrics of links, the trace. A step is *in flight* until the last stage has
reported it, because only then are its tokens known. It stays in the book until every stage has reported it.

All times are nanoseconds on the head's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ppserve.core.plan import StepPlan, StepResult, StepStamps

STEP_DEADLINE_NS = 60_000_000_000
_LEAST_DEADLINE_NS = 10_000_000_000
# The cost of a row falls with the number of rows, so a step of few rows overestimates that of many; this allows
# for everything else that may slow one step down.
_DEADLINE_FACTOR = 5


@dataclass(frozen=True, slots=True)
class Transfer:
    """Hidden states of one step over one link. sender: the stage that computed them.

    sending_ns: how long the sender was occupied by handing them on. waited_ns: from computed, or from when the
    receiver was ready for them if that was later, to received; this is what the ledger calls `transfer`.
    latency_ns: from sent to received; None where the receiver was not waiting yet, because then the arrival was
    not observed.
    """

    sender: int
    num_bytes: int
    sending_ns: int
    waited_ns: int
    latency_ns: int | None


class Step:
    """A step from its dispatch until every stage has reported it. Only `Steps` writes to it.

    woken_ns: when the engine's turn that made it began. sent_ns: when its plan had gone out to all stages.
    fills_pipeline: with it, at least as many steps were in flight as there are stages; fills_lanes: as many as
    there are lanes. returned_ns: when the head had the last stage's result.
    """

    __slots__ = ("_results", "fills_lanes", "fills_pipeline", "plan", "returned_ns", "sent_ns", "woken_ns")

    def __init__(self, plan: StepPlan, num_stages: int, woken_ns: int, sent_ns: int) -> None:
        self.plan = plan
        self.woken_ns = woken_ns
        self.sent_ns = sent_ns
        self.fills_pipeline = self.fills_lanes = False
        self.returned_ns: int | None = None
        self._results: list[StepResult | None] = [None] * num_stages

    @property
    def is_in_flight(self) -> bool:
        return self.returned_ns is None

    @property
    def is_complete(self) -> bool:
        return None not in self._results

    def first_owing(self) -> int:
        """The first stage whose result is still to come: those after it cannot have begun."""
        return self._results.index(None)

    def result(self, stage: int) -> StepResult | None:
        return self._results[stage]

    def set_result(self, result: StepResult, now_ns: int) -> None:
        """For `Steps` alone."""
        self._results[result.stage] = result
        if result.stage == len(self._results) - 1:
            self.returned_ns = now_ns

    def stamps(self, stage: int) -> StepStamps | None:
        result = self._results[stage]
        return None if result is None else result.stamps

    def transfers(self, stage: int) -> Iterator[Transfer]:
        """The links whose two ends are known now that `stage` has reported."""
        for receiver in (stage, stage + 1):
            if 0 < receiver < len(self._results):
                sent, received = self._results[receiver - 1], self._results[receiver]
                if sent is not None and received is not None:
                    yield _transfer(sent, received)


class Steps:
    """The steps of one pipeline of `num_stages` stages. See the module for who writes and who reads."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.num_in_flight = 0
        self._steps: dict[int, Step] = {}
        self._moved_ns = 0  # when a stage last reported anything, or the book was last empty
        self._row_ns = 0.0  # the highest cost of a row that any stage has shown in a step

    def __len__(self) -> int:
        """Steps that not all stages have reported."""
        return len(self._steps)

    @property
    def in_flight(self) -> Iterator[Step]:
        return (step for step in self._steps.values() if step.is_in_flight)

    def sent(self, plan: StepPlan, woken_ns: int, sent_ns: int, num_lanes: int) -> Step:
        """A plan has gone out to all stages. num_lanes: how many steps may be in flight now."""
        if not self._steps:
            self._moved_ns = sent_ns
        step = Step(plan, self.num_stages, woken_ns, sent_ns)
        self.num_in_flight += 1
        step.fills_pipeline = self.num_in_flight >= self.num_stages
        step.fills_lanes = self.num_in_flight >= num_lanes
        self._steps[plan.step_id] = step
        return step

    def reported(self, result: StepResult, now_ns: int) -> Step | None:
        """A stage reported a step, its stamps on the head's clock.

        None for a step that is not in the book, or that the stage has reported before.
        """
        step = self._steps.get(result.step_id)
        if step is None or result.epoch != step.plan.epoch or step.result(result.stage) is not None:
            return None
        step.set_result(result, now_ns)
        self._moved_ns = now_ns
        if result.stage == self.num_stages - 1:
            self.num_in_flight -= 1
        if step.is_complete:
            del self._steps[result.step_id]
        computed_ns = result.stamps.ended - result.stamps.begun
        self._row_ns = max(self._row_ns, computed_ns / step.plan.num_tokens)
        return step

    def lost(self) -> None:
        """A stage was lost: nothing that is in the book will be reported any more."""
        self._steps.clear()
        self.num_in_flight = 0

    def head_paused(self, now_ns: int) -> None:
        """The head itself stood still: the silence until now says nothing about stages."""
        self._moved_ns = now_ns

    def stuck_stage(self, now_ns: int) -> int | None:
        """The stage that holds up the oldest step for longer than any step should take, if there is one."""
        oldest = next(iter(self._steps.values()), None)
        if oldest is None or now_ns - self._moved_ns <= self._deadline_ns(oldest.plan):
            return None
        return oldest.first_owing()

    def _deadline_ns(self, plan: StepPlan) -> float:
        """How long a stage may take for a step. Before any step has shown what rows cost, the longest time."""
        if not self._row_ns:
            return STEP_DEADLINE_NS
        return min(STEP_DEADLINE_NS, _LEAST_DEADLINE_NS + _DEADLINE_FACTOR * plan.num_tokens * self._row_ns)


def _transfer(sent: StepResult, received: StepResult) -> Transfer:
    out, into = sent.stamps, received.stamps
    return Transfer(
        sender=sent.stage,
        num_bytes=sent.bytes_sent,
        sending_ns=out.sent - out.ended,
        waited_ns=max(0, into.received - max(out.ended, into.awaited)),
        latency_ns=into.received - out.sent if into.awaited <= out.sent else None,
    )
