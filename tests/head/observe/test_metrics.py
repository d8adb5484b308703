import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from ppserve.core.architecture import Split, stage_layouts
from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.causes import BUSY, CAUSES
from ppserve.core.ledger.steps import Steps
from ppserve.core.plan import StepResult, StepStamps
from ppserve.core.request import FinishReason, Request, StopConditions
from ppserve.core.scheduling.scheduler import DRAFT_OUTCOMES
from ppserve.core.scheduling.sequence import SequenceEvent
from ppserve.errors import Overloaded, RequestFailed
from ppserve.head.descriptions import ModelDescription
from ppserve.head.engine.replica import ReplicaReading
from ppserve.head.engine.streams import OpenRequest
from ppserve.head.observe.metrics import STATUSES, Metrics
from ppserve.tokenizer import no_tokenizer
from tests.architectures import gpt2 as gpt2_architecture
from tests.core.artificial import account_of, plan
from tests.fake_engine import READING
from tests.hellos import changed

CONTRACT = {
    "ppserve_stage_busy_seconds_total": "counter",
    "ppserve_stage_bubble_seconds_total": "counter",
    "ppserve_stage_idle_seconds_total": "counter",
    "ppserve_stage_step_seconds": "histogram",
    "ppserve_transfer_seconds": "histogram",
    "ppserve_transfer_bytes_total": "counter",
    "ppserve_microbatches_in_flight": "gauge",
    "ppserve_microbatch_tokens": "histogram",
    "ppserve_time_to_first_token_seconds": "histogram",
    "ppserve_inter_token_latency_seconds": "histogram",
    "ppserve_time_per_output_token_seconds": "histogram",
    "ppserve_request_duration_seconds": "histogram",
    "ppserve_request_queue_seconds": "histogram",
    "ppserve_requests_total": "counter",
    "ppserve_prompt_tokens_total": "counter",
    "ppserve_generated_tokens_total": "counter",
    "ppserve_requests_running": "gauge",
    "ppserve_requests_waiting": "gauge",
    "ppserve_kv_usage_ratio": "gauge",
    "ppserve_serving": "gauge",
    "ppserve_stage_restarts_total": "counter",
    "ppserve_http_requests_total": "counter",
    "ppserve_log_lines_dropped_total": "counter",
    "ppserve_stage_info": "gauge",
    "ppserve_build_info": "gauge",
}


COMMON = {
    *("ppserve_requests_waiting", "ppserve_build_info", "ppserve_http_requests_total"),
    "ppserve_log_lines_dropped_total",
}


class Scrape:
    """What one GET of /metrics said: values by (sample name, labels)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = list(text_string_to_metric_families(text))
        samples = [s for family in self.families for s in family.samples]
        self.values = {(s.name, frozenset(s.labels.items())): s.value for s in samples}
        assert len(self.values) == len(samples), "a series appears twice"

    def __call__(self, name: str, **labels: str) -> float:
        """Return a value of the first replica, or one that is common to all."""
        return self.values[name, frozenset((labels if name in COMMON else {"replica": "0", **labels}).items())]

    def total(self, name: str, **labels: str) -> float:
        return sum(v for (n, ls), v in self.values.items() if n == name and ls >= set(labels.items()))


@pytest.fixture
def metrics():
    return Metrics(2)


def scrape(metrics: Metrics) -> Scrape:
    """What the metrics say, with an empty ledger."""
    metrics.read_pipelines(lambda: readings_of(account_of(2).snapshot(0)))
    return read(metrics)


def readings_of(*times: tuple[StageTimes, ...]) -> list[ReplicaReading]:
    """Replicas of one stage each whose ranks have spent this time. times: also of stages that no shape uses."""
    return [replace(READING, replica=number, times=each) for number, each in enumerate(times)]


def read(metrics: Metrics) -> Scrape:
    page = metrics.page()
    assert page.content_type.startswith("text/plain")
    return Scrape(page.body.decode())


def description() -> ModelDescription:
    arch = gpt2_architecture(4, 64, 4, 128, 300, 300, 256)
    return ModelDescription("tiny", arch, 1000, "float32", "none", 128, True, True, "", "0.1.0")


def opened(num_sequences: int = 1) -> OpenRequest:
    request = Request("r1", (1, 2, 3), StopConditions(8), num_sequences=num_sequences)
    opened = OpenRequest(request, None, no_tokenizer())
    opened.begin(10.0, tuple)
    return opened


def hear(metrics: Metrics, request: OpenRequest, event: SequenceEvent, now_s: float) -> None:
    metrics.requests.on_output(request, request.output(event, now_s), now_s)


# ---- the contract -----------------------------------------------------------------------------------------


def test_every_name_of_the_contract_has_its_type_and_a_zero(metrics):
    metrics.describe(description())
    seen = scrape(metrics)
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", seen.text, re.MULTILINE))
    assert types.items() >= CONTRACT.items()
    assert len(re.findall("^# HELP", seen.text, re.MULTILINE)) == len(types)
    assert all(name.startswith("ppserve_") and ":" not in name for name in types)
    assert not [name for name in types if name.endswith("_created")]
    for stage in "01":
        for phase in BUSY:
            assert seen("ppserve_stage_busy_seconds_total", stage=stage, phase=phase) == 0
            assert seen("ppserve_stage_step_seconds_count", stage=stage, phase=phase) == 0
        for cause in CAUSES:
            assert seen("ppserve_stage_bubble_seconds_total", stage=stage, cause=cause) == 0
        assert seen("ppserve_stage_idle_seconds_total", stage=stage) == 0
        assert seen("ppserve_stage_restarts_total", stage=stage, cause="exit") == 0
    for reason in (*(r.value for r in FinishReason), *STATUSES):
        assert seen("ppserve_requests_total", reason=reason) == 0
    assert seen("ppserve_transfer_bytes_total", stage="0") == 0
    assert seen("ppserve_generated_tokens_total") == 0
    for name, kind in CONTRACT.items():
        if kind == "histogram" and name.endswith("_seconds"):
            bounds = [float(dict(ls)["le"]) for (n, ls) in seen.values if n == f"{name}_bucket"]
            assert min(bounds) < 0.001, f"the buckets of {name} do not reach below a millisecond"


def test_every_tensor_rank_of_every_replica_has_its_row():
    metrics = Metrics(1, num_replicas=2)
    ((one,),) = READING.ranks
    readings = []
    for number in range(2):
        host = replace(one, hello=changed(one.hello, name=f"host{number}"))
        ranks = []
        for tensor, (of, size) in enumerate(((one, 510), (host, 490))):
            what = structs.replace(one.loaded, params=size)
            ranks.append(replace(of, rank=2 * number + tensor, tensor=tensor, loaded=what))
        readings.append(replace(READING, replica=number, ranks=(tuple(ranks),), gathered_ns=((0, 0),)))
    metrics.describe(description())
    metrics.read_pipelines(lambda: readings)
    seen = read(metrics)
    assert seen.total("ppserve_stage_info", stage="0") == 4
    assert seen.total("ppserve_stage_info", replica="1", rank="3", host="host1", params="490", device="cpu") == 1
    assert seen.total("ppserve_build_info", version="0.1.0", model="tiny", dtype="float32") == 1


def test_whether_each_replica_serves_is_a_gauge_also_before_its_pipeline_has_formed() -> None:
    metrics = Metrics(1, num_replicas=2)

    def serving() -> list[float]:
        return [read(metrics)("ppserve_serving", replica=str(replica)) for replica in range(2)]

    assert serving() == [0, 0]
    readings = [replace(READING, replica=number, serves=serves) for number, serves in enumerate((True, False))]
    metrics.read_pipelines(lambda: readings)
    assert serving() == [1, 0]


def test_where_layers_are_divided_anew_the_rows_of_before_end() -> None:
    metrics = Metrics(2)
    ((one,),) = READING.ranks
    told = []
    for sublayers in ((8,), (2, 6), (6, 2), (8,)):
        members = tuple((replace(one, rank=stage, stage=stage),) for stage in range(len(sublayers)))
        shape = replace(READING.decision, layouts=stage_layouts(Split(sublayers)))
        parts = {"steps": (0, 0), "steps_in_shape": (0, 0), "gathered_ns": ((0,), (0,))}
        times = READING.times * 2
        told.append([replace(READING, decision=shape, ranks=members, times=times, times_in_shape=times, **parts)])
    following = iter(told)
    metrics.read_pipelines(lambda: next(following))
    for expected in ({("0", "0-3")}, {("0", "0"), ("1", "1-3")}, {("0", "0-2"), ("1", "3")}, {("0", "0-3")}):
        seen = read(metrics)
        rows = [dict(labels) for name, labels in seen.values if name == "ppserve_stage_info"]
        assert {(row["stage"], row["layers"]) for row in rows} == expected
        assert len(rows) == len(expected)


def loaded(running: int, kv_usage: float, drafted: tuple[int, ...] = (0, 0)) -> Any:
    """What of a scheduler is measured. drafted: since its start, by outcome."""
    return SimpleNamespace(
        num_running=running,
        kv_usage=kv_usage,
        num_draft_tokens=dict(zip(DRAFT_OUTCOMES, drafted, strict=True)),
    )


def test_each_replica_has_its_own_figures():
    metrics = Metrics(1, num_replicas=2)
    times = [account_of(1).snapshot(0)[0], replace(account_of(1).snapshot(0)[0], idle_ns=3_000_000_000)]
    metrics.read_pipelines(lambda: readings_of((times[0],), (times[1],)))
    metrics.steps.on_load(0, loaded(running=4, kv_usage=0.25), 2, 3)
    metrics.steps.on_load(1, loaded(running=1, kv_usage=0.75), 1, 3)
    hear(metrics, opened(), SequenceEvent("r1", 0, 0, 0, 5, admitted_s=10.25, replica=1), 11.0)
    seen = read(metrics)
    for replica, running, usage, idle_s, tokens in (("0", 4, 0.25, 0.0, 0), ("1", 1, 0.75, 3.0, 1)):
        assert seen("ppserve_microbatches_in_flight", replica=replica) == 2 - int(replica)
        assert seen("ppserve_requests_running", replica=replica) == running
        assert seen("ppserve_kv_usage_ratio", replica=replica) == usage
        assert seen("ppserve_stage_idle_seconds_total", replica=replica, stage="0") == idle_s
        assert seen("ppserve_generated_tokens_total", replica=replica) == tokens
    assert seen("ppserve_requests_waiting") == 3
    load = metrics.read_load()
    assert (load["running"], load["kv_usage"], load["generated_tokens"]) == (5, 0.5, 1)


def test_draft_tokens_are_counted_as_often_as_there_were_some() -> None:
    metrics = Metrics(1, num_replicas=2)
    for drafted in ((5, 3), (5, 3), (9, 4)):
        metrics.steps.on_load(0, loaded(1, 0.5, drafted), 1, 3)
    metrics.steps.on_load(1, loaded(1, 0.5, (2, 1)), 1, 3)
    seen = read(metrics)
    for replica, drafted in (("0", (9, 4)), ("1", (2, 1))):
        for outcome, count in zip(DRAFT_OUTCOMES, drafted, strict=True):
            assert seen("ppserve_draft_tokens_total", replica=replica, outcome=outcome) == count


# ---- the ledger -------------------------------------------------------------------------------------------


def test_a_scrape_reads_the_ledger_once_and_sums_to_the_wall_on_every_stage(metrics):
    account, readings = account_of(2), iter([7_500_000_000])
    account.demand_began(1_000_000_000)
    account.demand_ended(3_000_000_000)
    metrics.read_pipelines(lambda: readings_of(account.snapshot(next(readings))))
    seen = read(metrics)
    for stage in "01":
        assert seen("ppserve_stage_idle_seconds_total", stage=stage) == 5.5
        total = sum(
            seen.total(f"ppserve_stage_{kind}_seconds_total", stage=stage) for kind in ("busy", "bubble", "idle")
        )
        assert total == pytest.approx(7.5)


# ---- steps ------------------------------------------------------------------------------------------------


def test_a_step_in_either_order_of_reports(metrics):
    first = StepResult(
        epoch=1, step_id=7, stage=0, stamps=StepStamps(0, 0, 0, 0, 3_000_000, 3_000_000), bytes_sent=640
    )
    second = StepResult(
        epoch=1, step_id=7, stage=1, stamps=StepStamps(0, 1_000_000, 5_000_000, 5_000_000, 6_000_000, 6_000_000)
    )
    steps = Steps(2)
    for order in ((first, second), (second, first)):
        step = steps.sent(plan(7), 0, 0, num_slots=2)
        metrics.steps.on_step_sent(0, step, loaded(1, 0.5))
        for result in order:
            assert steps.reported(result, 7_000_000) is step
            metrics.steps.on_step_reported(0, step, result.stage)
    seen = scrape(metrics)
    assert seen("ppserve_stage_step_seconds_count", stage="0", phase="decode") == 2
    assert seen("ppserve_stage_step_seconds_sum", stage="0", phase="decode") == pytest.approx(0.006)
    assert seen("ppserve_transfer_seconds_count", stage="0") == 2
    assert seen("ppserve_transfer_seconds_sum", stage="0") == pytest.approx(0.004)
    assert seen("ppserve_transfer_bytes_total", stage="0") == 1280
    assert seen("ppserve_microbatch_tokens_sum", phase="decode") == 2


def test_a_restarted_stage_is_counted_by_cause(metrics):
    metrics.steps.on_stage_died(0, 1, "exit")
    metrics.steps.on_stage_died(0, 1, "did not join")
    seen = scrape(metrics)
    assert seen("ppserve_stage_restarts_total", stage="1", cause="exit") == 1
    assert seen("ppserve_stage_restarts_total", stage="1", cause="did not join") == 1
    assert seen("ppserve_stage_restarts_total", stage="0", cause="exit") == 0


# ---- requests ---------------------------------------------------------------------------------------------


def test_the_life_of_a_request(metrics):
    request = opened()
    first = SequenceEvent("r1", 0, 0, 0, 5, admitted_s=10.25, replica=0, cached_tokens=2)
    hear(metrics, request, first, 10.5)
    hear(metrics, request, SequenceEvent("r1", 0, 0, 1, 6, cached_tokens=2), 10.75)
    end = SequenceEvent("r1", 0, 0, 2, 7, finish=FinishReason.EOS, cached_tokens=2)
    hear(metrics, request, end, 11.25)
    seen = scrape(metrics)
    for name, count, total in (
        ("time_to_first_token", 1, 0.5),
        ("inter_token_latency", 2, 0.75),
        ("time_per_output_token", 1, 0.375),
        ("request_duration", 1, 1.25),
        ("request_queue", 1, 0.25),
    ):
        assert seen(f"ppserve_{name}_seconds_count") == count
        assert seen(f"ppserve_{name}_seconds_sum") == pytest.approx(total)
    assert seen("ppserve_prompt_tokens_total") == 3
    assert seen("ppserve_cached_prompt_tokens_total") == 2
    assert seen("ppserve_generated_tokens_total") == 3
    assert seen("ppserve_requests_total", reason="EOS") == 1


def test_a_request_of_two_sequences_is_one_request(metrics):
    request = opened(num_sequences=2)
    for index, now_s in ((0, 11.0), (1, 11.0), (0, 12.0), (1, 13.0)):
        finish = FinishReason.MAX_TOKENS if now_s > 11 else None
        end = {"finish": finish, "cached_tokens": 2}
        event = SequenceEvent("r1", index, index, 0, 5, **end, admitted_s=10.0, replica=0)
        hear(metrics, request, event, now_s)
    seen = scrape(metrics)
    assert seen("ppserve_prompt_tokens_total") == 3
    assert seen("ppserve_cached_prompt_tokens_total") == 2, "no more of a prompt is found than it has"
    assert seen("ppserve_time_to_first_token_seconds_count") == 1
    assert seen("ppserve_inter_token_latency_seconds_sum") == 3
    assert seen("ppserve_requests_total", reason="MAX_TOKENS") == 1
    assert seen("ppserve_request_duration_seconds_sum") == 3


def test_failed_and_refused_requests_are_counted_once_by_reason(metrics):
    """A request of which one answer failed has failed, though the others were cancelled."""
    request = opened(num_sequences=2)
    hear(metrics, request, SequenceEvent("r", 0, 0, 0, error=RequestFailed("not finite")), 11.0)
    hear(metrics, request, SequenceEvent("r", 1, 1, 0, finish=FinishReason.CANCELLED), 11.0)
    metrics.requests.on_refused(Overloaded("the queue is full", 1.0))
    seen = scrape(metrics)
    assert seen("ppserve_requests_total", replica="", reason="INTERNAL") == 1
    assert seen("ppserve_requests_total", replica="", reason="CANCELLED") == 0
    assert seen("ppserve_requests_total", replica="", reason="RESOURCE_EXHAUSTED") == 1
    assert seen("ppserve_request_queue_seconds_count") == 0
