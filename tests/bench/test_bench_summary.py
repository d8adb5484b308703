"""Figures from answers whose times are written out, and what is printed and written of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ppserve.bench.ledger import between
from ppserve.bench.measure import OpenLoop
from ppserve.bench.summary import conclude, render_ledger, render_table, summarize
from ppserve.core.ledger.causes import CAUSES
from tests.bench.answers import LEDGER, SERVED, answer, failed, measurement, times_of

# Sent at 1 and 2; the first waits 0.5 s for its first token, then 0.1 s for each; the second gets three at once.
FIRST = answer(0, 1.0, [(1.5, 1), (1.6, 1), (1.7, 1)])
SECOND = answer(1, 2.0, [(2.1, 1), (3.1, 3)], prompt=7)


def test_latencies() -> None:
    summary = summarize(measurement(FIRST, SECOND))
    assert summary.ttft.mean == pytest.approx(300)
    assert summary.tpot.mean == pytest.approx((100 + 1000 / 3) / 2)
    assert summary.itl.mean == pytest.approx((100 + 100 + 1000) / 3)
    assert summary.e2el.mean == pytest.approx((700 + 1100) / 2)
    assert summary.client_cores == pytest.approx(0.1)


def test_the_time_of_a_token_counts_tokens_and_not_messages() -> None:
    merged = answer(2, 0.0, [(1.0, 2), (1.25, 3), (1.5, 2)])
    assert (merged.num_tokens, merged.tpot_s, merged.itls_s) == (7, 0.1, [0.25, 0.25])
    at_once = answer(3, 0.0, [(1.0, 7)])
    assert (at_once.tpot_s, at_once.itls_s) == (None, [])
    assert summarize(measurement(merged, at_once)).tpot.mean == pytest.approx(100)


def test_failures_count_for_nothing_but_failures() -> None:
    with_failures = summarize(measurement(FIRST, SECOND, failed(2, 1.0, 1.1), failed(3, 1.0, 9.0, "UNAVAILABLE")))
    without = summarize(measurement(FIRST, SECOND))
    assert with_failures.errors_by_status == {"RESOURCE_EXHAUSTED": 1, "UNAVAILABLE": 1}
    assert with_failures.failed == 2
    of_all = {"num_prompts": 0}
    of_failures = {"failed": 0, "errors_by_status": {}, "problems": {}}
    assert replace(with_failures, **of_failures, **of_all) == replace(without, **of_all)
    nothing = summarize(measurement(failed(0, 1.0, 2.0), duration_s=0.0))
    assert (nothing.output_throughput, nothing.ttft.p99) == (0.0, 0.0)
    assert "1 of 1 requests failed with RESOURCE_EXHAUSTED: the queue is full" in render_table(nothing)


def test_the_table_has_the_labels_that_tools_parse() -> None:
    table = render_table(summarize(measurement(FIRST, SECOND)))
    rows = [(line[:40].rstrip(), line[40:].strip()) for line in table.splitlines()]
    labels = {label: value for label, value in rows if label.endswith(":")}
    counts = ("Successful requests:", "Failed requests:", "Maximum request concurrency:", "Total input tokens:")
    assert [labels[name] for name in (*counts, "Total generated tokens:")] == ["2", "0", "2", "12", "7"]
    rates = ("Request throughput (req/s):", "Output token throughput (tok/s):", "Total token throughput (tok/s):")
    assert [labels[name] for name in ("Benchmark duration (s):", *rates)] == ["10.00", "0.20", "0.70", "1.90"]
    for name in ("TTFT", "TPOT", "ITL", "E2EL"):
        assert {f"Mean {name} (ms):", f"Median {name} (ms):", f"P99 {name} (ms):"} <= set(labels)
    assert labels["Mean TTFT (ms):"] == "300.00"
    titles = [line.strip("=-") for line in table.splitlines() if line.startswith("-----") or " Serving " in line]
    assert titles == [
        *(" Serving Benchmark Result ", "Time to First Token", "Time per Output Token (excl. 1st token)"),
        *("Inter-token Latency", "End-to-end Latency"),
    ]


def test_a_sentence_concludes_the_run() -> None:
    summary = summarize(measurement(FIRST, SECOND, failed(2, 1.0, 1.1)))
    assert conclude(summary).startswith("2 of 3 requests were answered in ")
    assert " tokens a second in all, the first after " in conclude(summary)
    assert render_table(summary).endswith(f"\n\n{conclude(summary)}")
    nothing = summarize(measurement(failed(0, 1.0, 2.0), duration_s=2.0))
    assert conclude(nothing) == "0 of 1 requests were answered in 2.0 s."


def test_the_table_shows_the_bubbles() -> None:
    lines = render_table(summarize(measurement(FIRST))).splitlines()
    at = next(place for place, line in enumerate(lines) if line.startswith("stage "))
    assert lines[at].split()[5:11] == ["fill_drain", "imbalance", "transfer", "token_return", "host", "gather"]
    first, second = (line.split() for line in lines[at + 1 : at + 3])
    assert first == ["0", "75.00", "25.00", "12.50", "0.00", "0.00", "0.00", "12.50", "0.00", "20.00"]
    assert second == ["1", "50.00", "50.00", "12.50", "37.50", "0.00", "0.00", "0.00", "0.00", "20.00"]


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


def test_an_open_loop_counts_from_when_requests_were_due() -> None:
    late = answer(0, 3.0, [(3.5, 1)], intended_s=1.0)
    summary = summarize(measurement(late, load=OpenLoop([0.0], 4.0)))
    assert summary.ttft.mean == pytest.approx(2500)
    assert (summary.request_rate, summary.max_concurrency) == (4.0, None)
    table = render_table(summary)
    assert "Request rate configured (RPS):           4.00" in table
    assert "concurrency" not in table


def test_stages_are_numbered_within_their_replica() -> None:
    summary = summarize(measurement(FIRST, served=replace(SERVED, num_stages=1, num_replicas=2)))
    assert [row.split()[0] for row in render_ledger(summary.stages, 2)] == ["stage", "0.0", "1.0"]
    assert [(each["replica"], each["stage"]) for each in summary.to_json()["stages"]] == [(0, 0), (1, 0)]
