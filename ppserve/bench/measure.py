"""One run against a server: warm-up, then the load between two readings of the server's ledger."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from ppserve.bench.caller import Answer, Caller
from ppserve.bench.ledger import between, read_ledger
from ppserve.bench.load import ClosedLoop, Load, Until, run_load
from ppserve.bench.workload import Question, Workload
from ppserve.client import CallFailed
from ppserve.core.ledger.account import StageTimes


@dataclass(frozen=True, slots=True)
class Served:
    """A server and what it says about itself."""

    target: str
    model_id: str
    dtype: str
    num_stages: int
    """Of each replica."""
    num_tensor: int
    """Ranks of each stage."""
    num_replicas: int
    microbatches: int
    vocab_size: int
    max_context: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run, as measured."""

    served: Served
    load: Load
    seed: int
    answers: list[Answer]
    duration_s: float
    """From the first request to the last answer."""
    ledger: tuple[StageTimes, ...]
    """The stages' time meanwhile."""
    client_cpu_s: float
    """The load generator's own CPU time."""
    was_interrupted: bool
    """Ctrl-C ended it early."""


async def introduce(caller: Caller, target: str) -> Served:
    """Asks the server for its model and stages. Raises CallFailed."""
    model, topology = await caller.model_info(), await caller.topology()
    num_replicas = max(1, len(topology.replicas))
    return Served(
        target,
        model.model,
        model.dtype,
        num_stages=len(topology.stages) // num_replicas,
        num_tensor=max((len(stage.ranks) for stage in topology.stages), default=1),
        num_replicas=num_replicas,
        microbatches=topology.microbatches,
        vocab_size=model.architecture.vocab_size,
        max_context=model.max_context,
    )


async def warm_up(caller: Caller, workload: Workload, num_requests: int, concurrency: int) -> None:
    """Sends requests that are not counted. Raises CallFailed if one fails: the others would fail as well."""

    def question(number: int) -> Question:
        return workload.question(-1 - number)

    answers: list[Answer] = []
    await run_load(caller.ask, question, ClosedLoop(concurrency), Until(num_requests), answers)
    for answer in answers:
        if not answer.is_ok:
            raise CallFailed(answer.status, f"while warming up: {answer.problem}")


async def measure(caller: Caller, served: Served, workload: Workload, load: Load, until: Until) -> Measurement:
    """One run. Raises CallFailed when the server does not answer before or after it, not when requests fail.

    If this task is cancelled (Ctrl-C), the measurement has the requests that were answered until then.
    """
    before = read_ledger(await caller.topology())
    cpu_s, begun_s = time.process_time(), time.perf_counter()
    answers: list[Answer] = []
    was_interrupted = False
    try:
        await run_load(caller.ask, workload.question, load, until, answers)
    except asyncio.CancelledError:
        was_interrupted = True
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
    ended_s = max((answer.ended_s for answer in answers), default=begun_s)
    cpu_s = time.process_time() - cpu_s
    ledger = between(before, read_ledger(await caller.topology()))
    return Measurement(
        served, load, workload.seed, answers, ended_s - begun_s, ledger, cpu_s, was_interrupted
    )  # fmt: skip
