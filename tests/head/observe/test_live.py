"""The live page's state and content policy; `tests/e2e/test_live_page.py` opens it in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from importlib import resources

from prometheus_client.parser import text_string_to_metric_families

from ppserve.bench.ledger import read_ledger
from ppserve.core.ledger.account import Settled, StageTimes
from ppserve.core.ledger.causes import BUSY, CAUSES, HOST, IDLE, KINDS, Span
from ppserve.head.api.grpc.described import topology_message
from ppserve.head.descriptions import describe_topology
from ppserve.head.observe.live import (
    MAX_SPANS,
    WINDOW_S,
    RecentSpans,
    describe_schedule,
    live_pages,
    read_state,
)
from ppserve.head.observe.metrics import Metrics
from tests.fake_engine import CARD, READING

HTML = resources.files("ppserve").joinpath("head/observe/web/index.html").read_text("utf-8")
SECOND = 1_000_000_000


def test_the_schedule_keeps_the_latest_spans_and_no_idle_time() -> None:
    schedule = RecentSpans(2, 1)
    schedule.on_span_settled(0, Settled(0, Span(0, 5, IDLE), None))
    schedule.on_span_settled(0, Settled(0, Span(5, 9, HOST), 7))
    for step in range(3 * MAX_SPANS):
        schedule.on_span_settled(0, Settled(1, Span(step, step + 1, "decode"), step))
    first, second = schedule.recent()
    assert [s.span.kind for s in first] == [HOST]
    assert [s.step_id for s in second] == list(range(2 * MAX_SPANS, 3 * MAX_SPANS))


def test_every_kind_of_time_has_its_own_name_wherever_it_is_shown() -> None:
    """On the live page, in metrics, and in the topology, from which `ppserve top` and `bench` read it."""
    ns = {kind: (number + 1) * SECOND for number, kind in enumerate(KINDS)}
    busy, bubble = ({kind: ns[kind] for kind in kinds} for kinds in (BUSY, CAUSES))
    readings = (replace(READING, times=(StageTimes(busy, bubble, ns[IDLE]),)),)
    state = read_state(readings, CARD, {}, [[]])
    assert state["stages"][0]["time_s"] == {kind: value / SECOND for kind, value in ns.items()}
    told = topology_message(describe_topology(readings))
    assert read_ledger(told) == (StageTimes({"busy": sum(busy.values())}, bubble, ns[IDLE]),)
    metrics = Metrics(1)
    metrics.read_ledger(lambda: tuple(reading.times for reading in readings))
    shown = {
        sample.labels.get("phase") or sample.labels.get("cause") or IDLE: sample.value * SECOND
        for family in text_string_to_metric_families(metrics.page().body.decode())
        for sample in family.samples
        if re.fullmatch("ppserve_stage_(busy|bubble|idle)_seconds_total", sample.name)
    }
    assert shown == ns


def test_spans_are_told_as_microseconds_before_now_within_the_window() -> None:
    now_ns = 100 * SECOND
    old = Settled(0, Span(0, now_ns - int(WINDOW_S * SECOND), HOST), None)
    new = Settled(0, Span(99 * SECOND, 99 * SECOND + 2_000_000, "mixed"), 41)
    nameless = Settled(0, Span(now_ns - 1000, now_ns, HOST), None)
    ((first, second),) = describe_schedule([[old, new, nameless]], now_ns)
    assert first == (KINDS.index("mixed"), 1_000_000, 2000, 41)
    assert second == (KINDS.index(HOST), 1, 1, -1)


def test_the_page_comes_with_a_policy_that_allows_its_own_script_and_style_only() -> None:
    pages = live_pages(lambda: {"now_s": 1.5})
    page, state = pages["/"](), pages["/state.json"]()
    assert (page.content_type, page.body.decode()) == ("text/html; charset=utf-8", HTML)
    assert (state.content_type, json.loads(state.body)) == ("application/json", {"now_s": 1.5})
    (policy,) = re.findall(r'"Content-Security-Policy" content="default-src .none.; (.*)">', HTML)
    for tag in ("script", "style"):
        (block,) = re.findall(f"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}';" in policy
    assert "unsafe" not in policy


def test_the_page_needs_nothing_from_elsewhere_and_makes_no_markup_of_what_it_hears() -> None:
    foreign = r"https?://|//[a-z]+\.|@import|<script [^>]*src|<link(?! rel=\"icon\" href=\"data:,\")"
    assert not re.search(foreign, HTML)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", HTML)
