"""One run against a server: warm-up, then the load between two readings of the server's ledger."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

from ppserve.bench.caller import Answer, Caller
from ppserve.bench.ledger import between, read_ledger
from ppserve.bench.load import ClosedLoop, Load, Until, Watch, run_load
from ppserve.bench.scrape import MetricsReading, ScrapeFailed, fetch_metrics
from ppserve.bench.summary import Measurement, Setting
from ppserve.bench.workload import Question, Workload
from ppserve.client import CallFailed


@dataclass(frozen=True, slots=True)
class Served:
    """A server and what it says about itself. setting: the label of runs against it. metrics: HOST:PORT of its
    metrics page, or None."""

    setting: Setting
    metrics: str | None
    vocab_size: int
    max_context: int

    def under(self, concurrency: int | None, rate: float, seed: int) -> Served:
        """The same, labelled with a load."""
        return replace(
            self, setting=replace(self.setting, max_concurrency=concurrency, request_rate=rate, seed=seed)
        )


async def introduce(caller: Caller, target: str, metrics: str | None) -> Served:
    """Asks the server for its model and stages. Raises CallFailed; ScrapeFailed when `metrics` cannot be read."""
    if metrics is not None:
        await asyncio.to_thread(fetch_metrics, metrics)
    told, topology = await caller.model_info(), await caller.topology()
    num_replicas = max(1, len(topology.replicas))
    setting = Setting(
        target,
        told.model,
        told.dtype,
        len(topology.stages) // num_replicas,
        topology.microbatches,
        num_tensor=max((len(stage.ranks) for stage in topology.stages), default=1),
        num_replicas=num_replicas,
    )
    return Served(setting, metrics, told.architecture.vocab_size, told.max_context)


async def warm_up(caller: Caller, workload: Workload, num_requests: int, concurrency: int) -> None:
    """Sends requests that are not counted. Raises CallFailed if one fails: the others would fail as well."""

    def question(number: int) -> Question:
        return workload.question(-1 - number)

    answers = await run_load(caller.ask, question, ClosedLoop(concurrency), Until(num_requests), Watch())
    for answer in answers:
        if not answer.is_ok:
            raise CallFailed(answer.status, f"while warming up: {answer.problem}")


async def measure(
    caller: Caller, served: Served, workload: Workload, load: Load, until: Until, watch: Watch
) -> Measurement:
    """One run. Raises CallFailed when the server does not answer before or after it, not when requests fail.

    If this task is cancelled (Ctrl-C), the measurement has the requests that were answered until then.
    """
    metrics_before = await _metrics(served)
    before = read_ledger(await caller.topology())
    cpu_s, begun_s = time.process_time(), time.perf_counter()
    answers: list[Answer] = []
    was_interrupted = False

    async def ask(question: Question, intended_s: float) -> Answer:
        answer = await caller.ask(question, intended_s)
        answers.append(answer)
        return answer

    try:
        await run_load(ask, workload.question, load, until, watch)
    except asyncio.CancelledError:
        was_interrupted = True
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
    answers.sort(key=lambda answer: answer.question.number)
    ended_s = max((answer.ended_s for answer in answers), default=begun_s)
    cpu_s = time.process_time() - cpu_s
    after = read_ledger(await caller.topology())
    metrics_after = await _metrics(served)
    return Measurement(
        setting=served.setting,
        answers=answers,
        duration_s=ended_s - begun_s,
        ledger=between(before, after),
        client_cpu_s=cpu_s,
        server_side=_server_side(metrics_before, metrics_after),
        was_interrupted=was_interrupted,
    )


async def _metrics(served: Served) -> MetricsReading | None:
    if served.metrics is None:
        return None
    try:
        return await asyncio.to_thread(fetch_metrics, served.metrics)
    except ScrapeFailed:
        return None  # the figures of the clients are useful without it


def _server_side(before: MetricsReading | None, after: MetricsReading | None) -> dict[str, float]:
    """What the server counted between the readings. Clients measure more: the network's time comes on top."""
    if before is None or after is None:
        return {}
    figures: dict[str, float] = {}
    for name, metric in (
        ("queue", "request_queue_seconds"),
        ("ttft", "time_to_first_token_seconds"),
        ("itl", "inter_token_latency_seconds"),
        ("e2el", "request_duration_seconds"),
    ):
        seen = after.histogram(f"ppserve_{metric}").since(before.histogram(f"ppserve_{metric}"))
        figures[f"mean_{name}_ms"] = 1e3 * (seen.mean or 0.0)
    for name in ("generated_tokens", "cached_prompt_tokens", "stage_restarts"):
        figures[name] = after.value(f"ppserve_{name}_total") - before.value(f"ppserve_{name}_total")
    return figures
