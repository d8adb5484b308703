"""What `ppserve top` shows: from readings to text, and as a process with and without a terminal."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ppserve.bench.ledger import shares
from ppserve.bench.top import MetricsReading, ServerReading, View, bar, parse_metrics
from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.causes import CAUSES
from ppserve.v1 import generation_pb2 as pb
from tests.bench.answers import LEDGER, times_of
from tests.bench.terminal import Terminal
from tests.fake_engine import FakeEngine, served_in_thread


def topology(busy_s: float, host_s: float, idle_s: float, *, live: bool = True) -> pb.GetTopologyResponse:
    stages = [
        pb.Stage(
            stage=number, device="cpu", layers=f"{4 * number}-{4 * number + 3}", busy_seconds=busy_s,
            bubble_seconds={"host": host_s}, idle_seconds=idle_s, live=live or number == 0, restarts=number,
        )
        for number in range(2)
    ]  # fmt: skip
    return pb.GetTopologyResponse(stages=stages, transport="shm", epoch=1, microbatches=2, advice="buy a cluster")


def page(generated: int, ttfts_s: list[float]) -> MetricsReading:
    registry = CollectorRegistry()
    Counter("ppserve_generated_tokens", "", registry=registry).inc(generated)
    Gauge("ppserve_requests_running", "", registry=registry).set(3)
    Gauge("ppserve_kv_usage_ratio", "", registry=registry).set(0.125)
    histogram = Histogram("ppserve_time_to_first_token_seconds", "", buckets=(0.1, 0.2, 0.4), registry=registry)
    for ttft_s in ttfts_s:
        histogram.observe(ttft_s)
    return parse_metrics(generate_latest(registry).decode())


LOST = View(ServerReading(1, topology(1, 1, 1), None), ServerReading(2, topology(2, 1, 1, live=False), None))
"""In the second of two readings stage 1 is lost."""


def example() -> View:
    before = ServerReading(10.0, topology(100.0, 50.0, 1000.0), page(500, [0.3]))
    after = ServerReading(12.0, topology(101.0, 50.5, 1000.5), page(700, [0.3, 0.15, 0.15]))
    return View(before, after)


def test_a_view_is_the_difference_of_two_readings() -> None:
    assert [times for _, _, times in example().stages] == [times_of(1.0, {"host": 0.5}, 0.5)] * 2
    text = example().render_line("")
    assert "100.0 tok/s" in text
    assert "TTFT p50 150.0" in text
    assert "ITL -" in text


def test_a_server_that_began_anew_has_no_negative_rates() -> None:
    before = ServerReading(10.0, topology(100, 50, 0), page(500, [0.3] * 9))
    view = View(before, ServerReading(11.0, topology(1, 0, 0), page(2, [])))
    assert "  0.0 tok/s" in view.render_line("").replace("|", " ")
    assert next(view.stages)[2].computed_ns == 10**9


def test_the_kv_use_of_replicas_is_their_mean() -> None:
    shares = 'ppserve_kv_usage_ratio{replica="0"} 0.6\nppserve_kv_usage_ratio{replica="1"} 0.7\n'
    readings = [ServerReading(at_s, topology(1, 1, 1), parse_metrics(shares)) for at_s in (1, 2)]
    assert "KV 65.0%" in "\n".join(View(*readings).render_screen("here:1", 120))


def test_the_screen_says_it_all_and_fits() -> None:
    for width in (40, 80, 200):
        for line in example().render_screen("here:1", width):
            assert len(line) <= width or line.startswith("█ busy")
    text = "\n".join(example().render_screen("here:1", 120))
    for part in ("2 stages over shm", "running 3", "KV 12.5%", "100.0 tok/s", "host 25.0%", "idle 25.0%", "ITL -"):
        assert part in text
    assert "50.0% busy" in text
    assert "restarted 1 x" in text
    assert "buy a cluster" in text
    assert "\n".join(LOST.render_screen("here:1", 120)).count("LOST") == 1
    alone = pb.GetTopologyResponse(stages=[pb.Stage(live=True)], transport="local", microbatches=1, epoch=1)
    view = View(ServerReading(1, alone, None), ServerReading(2, alone, None))
    line = "ppserve here:1   1 stage over local, up to 1 microbatch, epoch 1"
    assert view.render_screen("here:1", 120)[0] == line


def test_the_line_says_it_all() -> None:
    line = example().render_line("12:00:00")
    assert line.startswith("12:00:00 | stage 0: busy 50.0% host 25.0% idle 25.0% | stage 1:")
    assert "100.0 tok/s" in line
    assert "\n" not in line
    assert "stage 1 LOST" in LOST.render_line("")


def test_a_metrics_page_that_went_away_is_visible_until_it_is_back() -> None:
    readings = [
        ServerReading(1, topology(1, 1, 1), page(5, [])),
        ServerReading(2, topology(2, 1, 1), None, "http://here:1/metrics: refused"),
        ServerReading(3, topology(3, 1, 1), page(7, [])),
        ServerReading(4, topology(4, 1, 1), page(8, [])),
    ]
    lines = [View(a, b).render_line("") for a, b in pairwise(readings)]
    assert [line.count("no metrics: http://here:1/metrics: refused") for line in lines] == [1, 1, 0]
    screen = "\n".join(View(*readings[:2]).render_screen("here:1", 120))
    assert "no metrics: http://here:1/metrics: refused" in screen


times = st.builds(
    lambda busy, bubbles, idle: times_of(busy, dict(zip(CAUSES, bubbles, strict=True)), idle),
    st.floats(0, 100), st.lists(st.floats(0, 100), min_size=6, max_size=6), st.floats(0, 100),
)  # fmt: skip


@given(times, st.integers(1, 200))
def test_a_bar_is_as_wide_as_asked_and_true_to_a_cell(stage: StageTimes, width: int) -> None:
    drawn = bar(stage, width)
    assert len(drawn) == width
    glyphs = dict(zip(("busy", *CAUSES, "idle"), "█fixrhg·", strict=True))
    assert sum(share for _, share in shares(stage).items()) == pytest.approx(1)
    for kind, share in shares(stage).items():
        assert abs(drawn.count(glyphs[kind]) - share * width) <= 1 + 1e-6


def test_a_stage_without_time_is_idle() -> None:
    assert bar(times_of(0, {}, 0), 5) == "·····"
    assert bar(LEDGER[0], 10) == "██████fh··"


# ---- as a process ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    with served_in_thread(FakeEngine()) as target:
        yield target


def command(target: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "ppserve", "top", "--target", target, "--metrics", "none", *arguments]


@pytest.mark.slow
def test_once_and_not_a_terminal(target: str) -> None:
    once = command(target, "--once", "--interval", "0.1")
    done = subprocess.run(once, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert re.match(r"\d\d:\d\d:\d\d \| stage 0.*busy", line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "page", "problem"),
    [
        ("127.0.0.1:1", "none", "no answer from 127.0.0.1:1"),
        ("{target}", "127.0.0.1:port", "no metrics: http://127.0.0.1:port/metrics: "),
        ("{target}", "{target}", "no metrics: http://{target}/metrics: "),  # gRPC's port is no metrics page either
    ],
)
def test_no_server_or_no_page_is_one_line(target: str, server: str, page: str, problem: str) -> None:
    server, page, problem = (text.format(target=target) for text in (server, page, problem))
    done = subprocess.run(command(server, "--once", "--metrics", page), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert problem in done.stderr


@pytest.mark.slow
def test_a_live_screen_until_the_server_goes_away() -> None:
    with served_in_thread(FakeEngine()) as target:
        terminal = Terminal(command(target, "--interval", "0.1"))
        terminal.read_until(re.escape("\x1b[2J") + "(?s:.*)idle")
    try:
        terminal.read_until("no answer from")
        assert terminal.process.wait(30) == 1
    finally:
        terminal.close()
    assert "Traceback" not in terminal.seen


@pytest.mark.slow
def test_the_interrupt_key_ends_it_well(target: str) -> None:
    terminal = Terminal(command(target, "--interval", "0.1"))
    try:
        terminal.read_until("idle")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(30) == 0
    finally:
        terminal.close()
    assert "Traceback" not in terminal.seen
