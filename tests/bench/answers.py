"""Answers as tests need them: times written out, nothing measured."""

from __future__ import annotations

from ppserve.bench.caller import OK, Answer, Question
from ppserve.bench.measure import ClosedLoop, Load, Measurement, Served
from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.causes import CAUSES

SERVED = Served(
    *("here:1", "m", "float32"), num_stages=2, num_tensor=1, num_replicas=1, microbatches=2, vocab_size=50,
    max_context=64,
)  # fmt: skip
TWO_CALLERS = ClosedLoop(2)


def times_of(busy_s: float, bubble_s: dict[str, float], idle_s: float) -> StageTimes:
    bubble_ns = {cause: round(bubble_s.get(cause, 0.0) * 1e9) for cause in CAUSES}
    return StageTimes({"busy": round(busy_s * 1e9)}, bubble_ns, round(idle_s * 1e9))


LEDGER = (
    times_of(6.0, {"fill_drain": 1.0, "host": 1.0}, 2.0),
    times_of(4.0, {"fill_drain": 1.0, "imbalance": 3.0}, 2.0),
)


def answer(
    number: int,
    sent_s: float,
    arrivals: list[tuple[float, int]],
    *,
    prompt: int = 5,
    intended_s: float | None = None,
) -> Answer:
    """One that went well; times are absolute."""
    tokens = sum(count for _, count in arrivals)
    intended_s = sent_s if intended_s is None else intended_s
    question = Question(number, (1,) * prompt, tokens)
    return Answer(question, intended_s, arrivals[-1][0], tuple(arrivals), OK)


def failed(number: int, sent_s: float, ended_s: float, status: str = "RESOURCE_EXHAUSTED") -> Answer:
    return Answer(Question(number, (1,) * 5, 4), sent_s, ended_s, (), status, "the queue is full")


def measurement(
    *answers: Answer, duration_s: float = 10.0, load: Load = TWO_CALLERS, served: Served = SERVED
) -> Measurement:
    return Measurement(served, load, 0, [*answers], duration_s, LEDGER, client_cpu_s=1.0, was_interrupted=False)
