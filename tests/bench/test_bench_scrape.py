"""The metrics page, as Prometheus's own library writes it."""

from __future__ import annotations

import asyncio
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ppserve.bench.top import ScrapeFailed, difference, fetch_metrics, parse_metrics, quantile


def test_values_and_labels() -> None:
    registry = CollectorRegistry()
    counter = Counter("things", "Of all kinds.", ["kind", "note"], registry=registry)
    counter.labels("a", 'quote " back \\ line \n comma , brace }').inc(3)
    counter.labels("b", "").inc(1.5e9)
    Gauge("level", "Now.", registry=registry).set(0.25)
    reading = parse_metrics(generate_latest(registry).decode())
    assert (reading.value("things_total"), reading.num("things_total")) == (3 + 1.5e9, 2)
    assert reading.value("level") == 0.25
    assert reading.value("nothing") == 0


@given(st.lists(st.floats(0, 20), min_size=1, max_size=40), st.lists(st.floats(0, 20), max_size=40))
def test_histograms_subtract(before: list[float], between: list[float]) -> None:
    registry = CollectorRegistry()
    histogram = Histogram("wait_seconds", "Waits.", buckets=(0.5, 1, 2, 5, 10), registry=registry)
    for value in before:
        histogram.observe(value)
    first = parse_metrics(generate_latest(registry).decode()).buckets("wait_seconds")
    for value in between:
        histogram.observe(value)
    second = parse_metrics(generate_latest(registry).decode()).buckets("wait_seconds")
    added = difference(first, second)
    assert added[math.inf] == len(between)
    if between:
        median = quantile(added, 0.5)
        assert median is not None
        # The true median and the estimate lie in the same bucket.
        true = sorted(between)[(len(between) - 1) // 2]
        bounds = [0, 0.5, 1, 2, 5, 10, math.inf]
        assert any(low <= median <= high and low <= true <= high for low, high in pairwise(bounds))
    else:
        assert quantile(added, 0.5) is None


def test_quantiles_are_promql_s() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("wait_seconds", "Waits.", buckets=(1, 2, 4), registry=registry)
    for value in (0.5, 1.5, 1.5, 3.0):
        histogram.observe(value)
    found = parse_metrics(generate_latest(registry).decode()).buckets("wait_seconds")
    assert quantile(found, 0.25) == 1.0
    assert quantile(found, 0.5) == 1.5
    assert quantile(found, 1.0) == 4.0
    histogram.observe(99)
    found = parse_metrics(generate_latest(registry).decode()).buckets("wait_seconds")
    assert quantile(found, 0.99) == 4.0


def test_pages_that_are_none() -> None:
    with pytest.raises(ScrapeFailed, match="<html>"):
        parse_metrics("<html>")
    with pytest.raises(ScrapeFailed, match="not a line"):
        parse_metrics("things_total many")
    with pytest.raises(ScrapeFailed, match=r"127\.0\.0\.1:1/metrics"):
        fetch_metrics("127.0.0.1:1")
    with pytest.raises(ScrapeFailed):
        fetch_metrics("nonsense")


def test_what_speaks_no_http_is_not_shown() -> None:
    """gRPC's port, say: its bytes are not for a terminal."""

    async def speak(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\x00\x1b[2J\x04\n")
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(speak, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(ScrapeFailed, match="no HTTP answer") as failed:
                await asyncio.to_thread(fetch_metrics, f"127.0.0.1:{port}")
            assert str(failed.value).isprintable()

    asyncio.run(main())
