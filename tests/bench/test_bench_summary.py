"""Figures from answers whose times are written out, and what is printed and written of them."""

from __future__ import annotations

import csv
import json
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from ppserve.bench.ledger import between
from ppserve.bench.report import render_ledger, render_sweep, render_table, write_csv, write_json
from ppserve.bench.summary import Distribution, parse_objectives, summarize
from ppserve.core.ledger.causes import CAUSES
from tests.bench.answers import LEDGER, SETTING, answer, failed, measurement, times_of

# Sent at 1 and 2; the first waits 0.5 s for its first token, then 0.1 s for each; the second gets three at once.
FIRST = answer(0, 1.0, [(1.5, 1), (1.6, 1), (1.7, 1)])
SECOND = answer(1, 2.0, [(2.1, 1), (3.1, 3)], prompt=7)


def test_distributions_are_those_of_the_standard_library() -> None:
    rng = random.Random(0)
    values = [rng.lognormvariate(0, 1) for _ in range(37)]
    found = Distribution.of(values)
    assert found.mean == pytest.approx(1e3 * statistics.fmean(values))
    assert found.std == pytest.approx(1e3 * statistics.pstdev(values))
    assert found.median == pytest.approx(1e3 * statistics.median(values))
    assert Distribution.of([]) == Distribution()


def test_latencies_and_throughput() -> None:
    summary = summarize(measurement(FIRST, SECOND))
    assert (summary.completed, summary.failed) == (2, 0)
    assert (summary.total_input_tokens, summary.total_output_tokens) == (12, 7)
    assert summary.request_throughput == pytest.approx(0.2)
    assert summary.output_throughput == pytest.approx(0.7)
    assert summary.total_token_throughput == pytest.approx(1.9)
    assert summary.ttft.mean == pytest.approx(300)
    assert summary.tpot.mean == pytest.approx((100 + 1000 / 3) / 2)
    assert summary.itl.mean == pytest.approx((100 + 100 + 1000) / 3)
    assert summary.e2el.mean == pytest.approx((700 + 1100) / 2)
    assert summary.client_cores == pytest.approx(0.1)
    assert summary.request_goodput is None


def test_failures_count_for_nothing_but_failures() -> None:
    with_failures = summarize(measurement(FIRST, SECOND, failed(2, 1.0, 1.1), failed(3, 1.0, 9.0, "UNAVAILABLE")))
    without = summarize(measurement(FIRST, SECOND))
    assert with_failures.errors_by_status == {"RESOURCE_EXHAUSTED": 1, "UNAVAILABLE": 1}
    assert with_failures.failed == 2
    of_all = {"num_prompts": 0, "max_concurrent_requests": 0, "start_delay": Distribution()}
    of_failures = {"failed": 0, "errors_by_status": {}, "problems": {}}
    assert replace(with_failures, **of_failures, **of_all) == replace(without, **of_all)
    nothing = summarize(measurement(failed(0, 1.0, 2.0), duration_s=0.0))
    assert (nothing.output_throughput, nothing.ttft.p99) == (0.0, 0.0)
    assert "1 of 1 requests failed with RESOURCE_EXHAUSTED: the queue is full" in render_table(nothing)


def test_latency_begins_when_it_was_due() -> None:
    late = answer(0, 3.0, [(3.5, 1)], intended_s=1.0)
    summary = summarize(measurement(late))
    assert summary.ttft.mean == pytest.approx(2500)
    assert summary.start_delay.mean == pytest.approx(2000)
    assert "Requests waited here before they were sent: mean 2000.0 ms" in render_table(summary)
    assert "waited here" not in render_table(summarize(measurement(FIRST)))


def test_peaks() -> None:
    back_to_back = [answer(n, float(n), [(n + 1.0, 2)]) for n in range(4)]
    assert summarize(measurement(*back_to_back)).max_concurrent_requests == 1
    overlapping = [answer(n, 0.1 * n, [(2.5, 5)]) for n in range(4)]
    summary = summarize(measurement(*overlapping))
    assert summary.max_concurrent_requests == 4
    assert summary.max_output_tokens_per_s == 20


def test_goodput_counts_who_keeps_all_limits() -> None:
    def goodput(*objectives: str) -> float | None:
        return summarize(measurement(FIRST, SECOND), parse_objectives(objectives)).request_goodput

    assert goodput("ttft:500.01") == pytest.approx(0.2)
    assert goodput("ttft:400") == pytest.approx(0.1)
    assert goodput("ttft:400", "tpot:300") == 0.0
    assert goodput("ttft:400 tpot:400,e2el:1101") == pytest.approx(0.1)
    assert parse_objectives([]) == {}
    # An answer of one token has no time between tokens to keep.
    assert summarize(measurement(answer(0, 0, [(0.1, 1)])), {"tpot": 1.0}).request_goodput == pytest.approx(0.1)


@pytest.mark.parametrize("text", ["ttft", "ttft:fast", "itl:5", "tpot:0", "tpot:-1", "tpot:nan"])
def test_objectives_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=f"^'{text}' is not a limit"):
        parse_objectives([text])


def test_the_table_has_the_labels_that_tools_parse() -> None:
    open_loop = replace(measurement(FIRST, SECOND), setting=replace(SETTING, request_rate=4.0))
    table = render_table(summarize(open_loop, {"ttft": 400.0}))
    rows = [(line[:40].rstrip(), line[40:].strip()) for line in table.splitlines()]
    labels = {label: value for label, value in rows if label.endswith(":")}
    assert labels["Successful requests:"] == "2"
    assert labels["Failed requests:"] == "0"
    assert labels["Maximum request concurrency:"] == "2"
    assert labels["Request rate configured (RPS):"] == "4.00"
    assert labels["Benchmark duration (s):"] == "10.00"
    assert labels["Total input tokens:"] == "12"
    assert labels["Total generated tokens:"] == "7"
    assert labels["Request throughput (req/s):"] == "0.20"
    assert labels["Request goodput (req/s):"] == "0.10"
    assert labels["Output token throughput (tok/s):"] == "0.70"
    assert labels["Peak output token throughput (tok/s):"] == "3.00"
    assert labels["Peak concurrent requests:"] == "1.00"
    assert labels["Total token throughput (tok/s):"] == "1.90"
    for name in ("TTFT", "TPOT", "ITL", "E2EL"):
        assert {f"Mean {name} (ms):", f"Median {name} (ms):", f"P99 {name} (ms):"} <= set(labels)
    assert labels["Mean TTFT (ms):"] == "300.00"
    for title in (
        "============ Serving Benchmark Result ============",
        "---------------Time to First Token----------------",
        "-----Time per Output Token (excl. 1st token)------",
        "---------------Inter-token Latency----------------",
        "----------------End-to-end Latency----------------",
    ):
        assert title in table.splitlines()


def test_the_table_shows_the_bubbles() -> None:
    lines = render_table(summarize(measurement(FIRST))).splitlines()
    at = next(place for place, line in enumerate(lines) if line.startswith("stage "))
    assert lines[at].split()[5:11] == ["fill_drain", "imbalance", "transfer", "token_return", "host", "gather"]
    first, second = (line.split() for line in lines[at + 1 : at + 3])
    assert first == ["0", "75.00", "25.00", "12.50", "0.00", "0.00", "0.00", "12.50", "0.00", "20.00"]
    assert second == ["1", "50.00", "50.00", "12.50", "37.50", "0.00", "0.00", "0.00", "0.00", "20.00"]


def test_stages_are_numbered_within_their_replica(tmp_path: Path) -> None:
    of_two = replace(SETTING, num_stages=1, num_replicas=2)
    summary = summarize(replace(measurement(FIRST), setting=of_two))
    assert [row.split()[0] for row in render_ledger(summary.stages, 2)] == ["stage", "0.0", "1.0"]
    assert [(each["replica"], each["stage"]) for each in summary.to_json()["stages"]] == [(0, 0), (1, 0)]
    write_csv(tmp_path / "run.csv", [summary])
    (row,) = csv.DictReader((tmp_path / "run.csv").read_text().splitlines())
    assert float(row["replica1_stage0_busy"]) == pytest.approx(LEDGER[1].busy_share)


def test_json_and_csv(tmp_path: Path) -> None:
    summary = summarize(measurement(FIRST, SECOND))
    write_json(tmp_path / "one.json", [summary])
    one = json.loads((tmp_path / "one.json").read_text())
    assert one["mean_ttft_ms"] == pytest.approx(300)
    assert {"p99_itl_ms", "median_tpot_ms", "std_e2el_ms", "request_throughput", "output_throughput"} <= set(one)
    assert (one["completed"], one["total_output_tokens"], one["request_rate"]) == (2, 7, "inf")
    assert one["stages"][1]["bubble_share_by_cause"]["imbalance"] == pytest.approx(3 / 8)
    write_json(tmp_path / "two.json", [summary, summary])
    assert len(json.loads((tmp_path / "two.json").read_text())) == 2
    write_csv(tmp_path / "two.csv", [summary, summarize(measurement(failed(0, 1, 2)))])
    with (tmp_path / "two.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["completed"] for row in rows] == ["2", "0"]
    assert float(rows[0]["stage1_bubble_imbalance"]) == pytest.approx(3 / 8)
    assert rows[1]["errors_by_status"] == "RESOURCE_EXHAUSTED:1"


def test_a_sweep_has_a_line_per_point() -> None:
    points = [
        summarize(replace(measurement(FIRST, SECOND), setting=replace(SETTING, max_concurrency=n))) for n in (1, 8)
    ]
    lines = render_sweep(points).splitlines()
    assert [line.split()[0] for line in lines] == ["concurrency", "1", "8"]
    assert lines[1].split()[-1] == "50.00"


def test_the_difference_of_two_ledgers() -> None:
    earlier = (times_of(1.0, {"host": 0.5}, 1.0), times_of(1.0, {}, 0.5))
    assert between(earlier, LEDGER) == (
        times_of(5.0, {"fill_drain": 1.0, "host": 0.5}, 1.0),
        times_of(3.0, {"fill_drain": 1.0, "imbalance": 3.0}, 1.5),
    )
    assert between(LEDGER, LEDGER)[0].wall_ns == 0
    assert between(LEDGER, LEDGER)[0].bubble_share() == 0.0
    # A server that was started anew in between is counted from its beginning; another pipeline is not compared.
    assert between(LEDGER, earlier) == earlier
    assert between(LEDGER[:1], LEDGER) == ()
    assert math.isclose(sum(map(LEDGER[0].bubble_share, CAUSES)), 0.25)
