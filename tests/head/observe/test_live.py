"""The page's state and content policy; `tests/e2e/test_live_page.py` opens it in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from ppserve.bench.ledger import read_ledger
from ppserve.core.ledger.account import Settled, StageTimes
from ppserve.core.ledger.causes import BUSY, CAUSES, HOST, IDLE, KINDS, MEANINGS, Span
from ppserve.core.ledger.steps import Step
from ppserve.core.plan import Slice, StepPlan
from ppserve.core.request import Request, StopConditions
from ppserve.core.scheduling.scheduler import Scheduler
from ppserve.head.api.grpc.described import topology_message
from ppserve.head.descriptions import describe_topology
from ppserve.head.listener import Ports
from ppserve.head.observe.live import (
    MAX_SEQUENCES,
    MAX_SPANS,
    WINDOW_S,
    RecentRequests,
    RecentSpans,
    describe_schedule,
    links_of,
    live_pages,
    read_state,
)
from ppserve.head.observe.metrics import Metrics
from ppserve.head.observe.page import page_of
from tests.fake_engine import CARD, READING

PAGE = page_of(asks="chat", wants_key=True)
HTML = PAGE.body.decode()
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
    """It is shown on the live page, in metrics, and in the topology, from which `ppserve top` and `bench` read
    it."""
    ns = {kind: (number + 1) * SECOND for number, kind in enumerate(KINDS)}
    busy, bubble = ({kind: ns[kind] for kind in kinds} for kinds in (BUSY, CAUSES))
    readings = (replace(READING, times=(StageTimes(busy, bubble, ns[IDLE]),)),)
    state = read_state(readings, CARD, {}, [[]], {})
    assert state["stages"][0]["time_s"] == {kind: value / SECOND for kind, value in ns.items()}
    told = topology_message(describe_topology(readings))
    assert read_ledger(told) == (StageTimes({"busy": sum(busy.values())}, bubble, ns[IDLE]),)
    metrics = Metrics(1)
    metrics.read_pipelines(lambda: readings)
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
    assert page.content_type == "text/html; charset=utf-8"
    assert page.body.decode() == HTML.replace(
        'data-asks="chat" data-wants-key="true"', 'data-asks="" data-wants-key="false"'
    )
    assert page.headers == PAGE.headers
    assert (state.content_type, json.loads(state.body)) == ("application/json", {"now_s": 1.5})
    policy = PAGE.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "connect-src 'self';" in policy
    for tag in ("script", "style"):
        (block,) = re.findall(f"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)
        assert len(block) > 1000
        digest = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}';" in policy
    assert "unsafe" not in policy


def test_the_page_needs_nothing_from_elsewhere_and_makes_no_markup_of_what_it_hears() -> None:
    foreign = r"https?://|//[a-z]+\.|@import|<script [^>]*src|<link(?! rel=\"icon\" href=\"data:,\")"
    # The name of SVG, which nobody fetches.
    assert not re.search(foreign, HTML.replace("http://www.w3.org/2000/svg", ""))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", HTML)


class _Scheduler(Scheduler):
    """Knows the requests of these sequences, and does nothing else."""

    def __init__(self, requests: dict[int, Request]) -> None:
        self._requests = requests

    def request_of(self, sequence_id: int) -> Request | None:
        return self._requests.get(sequence_id)


def test_a_caller_is_told_the_steps_of_its_own_request_and_of_no_other() -> None:
    def request(name: str, caller: str) -> Request:
        return Request(name, (1,), StopConditions(4), caller=caller)

    requests = {
        0: request("story/0", "key:a"),
        1: request("story/1", "key:b"),
        2: request("story/2/2", "key:a"),
        3: request("story/3", "key:a"),
    }
    recent = RecentRequests(2)
    sent = [(0, (0, 1)), (1, (1,)), (0, (2,)), (1, (3, 9)), (0, (9,))]
    for step_id, (replica, sequences) in enumerate(sent):
        slices = tuple(Slice(each, 0, (1,), (0,)) for each in sequences)
        plan = StepPlan(1, step_id, 0, slices)
        recent.on_step_sent(replica, Step(plan, 1, 0, 0, False, False), _Scheduler(requests))
    assert recent.steps_of("key:a", "story") == [[0], [3]]
    assert recent.steps_of("key:b", "story") == [[0], [1]]
    assert recent.steps_of("key:a", "story/2") == [[2], []]
    assert recent.steps_of("key:c", "story") == recent.steps_of("key:a", "") == [[], []]


def test_the_latest_steps_and_sequences_are_remembered() -> None:
    recent, stop = RecentRequests(1), StopConditions(4)
    scheduler = _Scheduler({0: Request("story/0", (1,), stop, caller="me")})
    for step_id in range(2 * MAX_SPANS):
        plan = StepPlan(1, step_id, 0, (Slice(0, 0, (1,), (0,)),))
        recent.on_step_sent(0, Step(plan, 1, 0, 0, False, False), scheduler)
    assert recent.steps_of("me", "story") == [list(range(MAX_SPANS, 2 * MAX_SPANS))]
    many = range(1, 1 + MAX_SEQUENCES)
    others = _Scheduler({number: Request(f"other/{number}", (1,), stop, caller="you") for number in many})
    plan = StepPlan(1, 2 * MAX_SPANS, 0, tuple(Slice(number, 0, (1,), (0,)) for number in many))
    recent.on_step_sent(0, Step(plan, 1, 0, 0, False, False), others)
    assert recent.steps_of("me", "story") == [[]], "as many sequences have come behind it as are kept"
    assert recent.steps_of("you", "other") == [[2 * MAX_SPANS]]


def test_a_server_says_whether_it_serves_and_where_its_page_is() -> None:
    away = replace(READING, replica=1, serves=False)
    links = links_of(Ports(1, 2, 3), has_page=True, has_tls=True)
    state = read_state((READING,), CARD, {}, [[]], links)
    assert (state["status"], state["links"]) == ("serving", {"metrics": "http:3", "ask": "https:2"})
    assert read_state((READING, away), CARD, {}, [[], []], {})["status"] == "recovering"
    assert links_of(Ports(1, 2, 3), has_page=False, has_tls=True) == {"metrics": "http:3"}


def test_every_kind_of_time_is_explained_and_what_is_lost_has_a_remedy() -> None:
    assert tuple(MEANINGS) == KINDS
    assert {kind for kind, meaning in MEANINGS.items() if meaning.helps} == set(CAUSES)
    told = read_state((READING,), CARD, {}, [[]], {})["meanings"]
    assert told[HOST] == {"what": MEANINGS[HOST].what, "helps": MEANINGS[HOST].helps}
