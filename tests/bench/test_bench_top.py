"""What `ppserve top` shows: from readings to text, and as a process with and without a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppserve.bench.ledger import shares
from ppserve.bench.top import Figures, ScrapeFailed, ServerReading, View, bar, fetch_figures, quantile
from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.causes import CAUSES
from ppserve.head.observe.metrics import Metrics
from ppserve.v1 import generation_pb2 as pb
from tests.bench.answers import LEDGER, times_of
from tests.commands import run
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


def latencies(*seconds: float) -> Figures:
    bounds_s = [0.1, 0.2, 0.4]
    return {"bounds_s": bounds_s, "counts": [sum(each <= bound for each in seconds) for bound in (*bounds_s, 9)]}


def page(generated: int, ttfts_s: list[float]) -> Figures:
    none = dict.fromkeys(("waiting", "in_flight", "requests", "prompt_tokens"), 0)
    load = {"running": 3, "kv_usage": 0.125, "generated_tokens": generated}
    return {**none, **load, "ttft": latencies(*ttfts_s), "itl": latencies()}


LOST = View(ServerReading(1, topology(1, 1, 1), None), ServerReading(2, topology(2, 1, 1, live=False), None))
"""Two readings; stage 1 is lost in the second."""
EXAMPLE = View(
    ServerReading(10.0, topology(100.0, 50.0, 1000.0), page(500, [0.3])),
    ServerReading(12.0, topology(101.0, 50.5, 1000.5), page(700, [0.3, 0.15, 0.15])),
)


def test_a_view_is_the_difference_of_two_readings() -> None:
    assert [times for _, _, times in EXAMPLE.stages] == [times_of(1.0, {"host": 0.5}, 0.5)] * 2
    line = EXAMPLE.render_line("12:00:00")
    assert line.startswith("12:00:00 | stage 0: busy 50.0% host 25.0% idle 25.0% | stage 1:")
    assert all(part in line for part in ("100.0 tok/s", "TTFT p50 150.0", "ITL -"))
    assert "\n" not in line
    assert "stage 1 LOST" in LOST.render_line("")


def test_a_server_that_began_anew_has_no_negative_rates() -> None:
    before = ServerReading(10.0, topology(100, 50, 0), page(500, [0.3] * 9))
    view = View(before, ServerReading(11.0, topology(1, 0, 0), page(2, [])))
    assert "  0.0 tok/s" in view.render_line("").replace("|", " ")
    assert next(view.stages)[2].computed_ns == 10**9


def test_the_screen_says_it_all_and_fits() -> None:
    for width in (40, 80, 200):
        for line in EXAMPLE.render_screen("here:1", width):
            assert len(line) <= width or line.startswith("█ busy")
    text = "\n".join(EXAMPLE.render_screen("here:1", 120))
    for part in (
        *("2 stages over shm", "running 3", "KV 12.5%", "100.0 tok/s", "host 25.0%", "idle 25.0%", "ITL -"),
        *("50.0% busy", "restarted 1 x", "buy a cluster"),
    ):
        assert part in text
    assert "\n".join(LOST.render_screen("here:1", 120)).count("LOST") == 1
    assert (bar(LEDGER[0], 10), bar(times_of(0, {}, 0), 5)) == ("██████fh··", "·····")
    alone = pb.GetTopologyResponse(stages=[pb.Stage(live=True)], transport="local", microbatches=1, epoch=1)
    line, *_ = View(ServerReading(1, alone, None), ServerReading(2, alone, None)).render_screen("here:1", 120)
    assert line == "ppserve here:1   1 stage over local, up to 1 microbatch, epoch 1"


def test_a_metrics_page_that_went_away_is_visible_until_it_is_back() -> None:
    readings = [
        ServerReading(1, topology(1, 1, 1), page(5, [])),
        ServerReading(2, topology(2, 1, 1), None, "http://here:1/metrics: refused"),
        ServerReading(3, topology(3, 1, 1), page(7, [])),
        ServerReading(4, topology(4, 1, 1), page(8, [])),
    ]
    lines = [View(a, b).render_line("") for a, b in pairwise(readings)]
    assert [line.count("no metrics: http://here:1/metrics: refused") for line in lines] == [1, 1, 0]
    assert "no metrics: http" in "\n".join(View(*readings[:2]).render_screen("here:1", 120))


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


# ---- the figures -----------------------------------------------------------------------------------------------


def test_quantiles_are_promql_s() -> None:
    bounds_s = 1.0, 2.0, 4.0
    assert [quantile(bounds_s, (1, 3, 4, 4), q) for q in (0.25, 0.5, 1.0)] == [1.0, 1.5, 4.0]
    assert (quantile(bounds_s, (1, 3, 4, 5), 0.99), quantile(bounds_s, (0, 0, 0, 0), 0.5)) == (4.0, None)


def test_pages_that_are_none() -> None:
    for address in ("127.0.0.1:1", "nonsense"):
        with pytest.raises(ScrapeFailed, match=address):
            fetch_figures(address)


@pytest.mark.parametrize("page", [b"[]", b'{"running": 1}', b"<p>"])
def test_another_server_s_page_is_refused(page: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Metrics(1, 1).read_load().keys() >= EXAMPLE.after.figures.keys()
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: io.BytesIO(page))
    with pytest.raises(ScrapeFailed, match="here:1/load"):
        fetch_figures("here:1")


# ---- as a command ----------------------------------------------------------------------------------------------


def flags(target: str, *arguments: str) -> list[str]:
    return ["top", "--target", target, "--metrics", "none", "--interval", "0.1", *arguments]


@pytest.mark.parametrize(
    ("server", "page", "problem"),
    [
        ("127.0.0.1:1", "none", "no answer from 127.0.0.1:1"),
        ("{target}", "127.0.0.1:1", "no metrics: http://127.0.0.1:1/load.json: "),
        # gRPC's port is no metrics page either
        ("{target}", "{target}", "no metrics: http://{target}/load.json: "),
    ],
)
def test_no_server_or_no_page_is_one_line(target: str, server: str, page: str, problem: str) -> None:
    server, page, problem = (text.format(target=target) for text in (server, page, problem))
    done = run(*flags(server, "--once", "--metrics", page))
    assert (done.returncode, done.stdout) == (1, "")
    assert problem in done.one_line
    assert done.stderr.strip().isprintable(), "what a port says that speaks no HTTP is not for a terminal"


@pytest.mark.slow
@pytest.mark.parametrize(("ended_by", "code"), [("server", 1), ("interrupt key", 0)])
def test_a_live_screen_on_a_terminal_until_the_server_goes_away_or_a_key_ends_it(ended_by: str, code: int) -> None:
    ours, theirs = pty.openpty()
    seen = ""

    def wait_for(pattern: str) -> None:
        nonlocal seen
        until_s = time.monotonic() + 60
        while re.search(pattern, seen) is None:
            assert time.monotonic() < until_s, seen
            if select.select([ours], [], [], 1.0)[0]:
                seen += os.read(ours, 65536).decode(errors="replace")

    with contextlib.ExitStack() as server:
        command = [sys.executable, "-m", "ppserve", *flags(server.enter_context(served_in_thread(FakeEngine())))]
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True) as process:
            os.close(theirs)
            try:
                wait_for(re.escape("\x1b[2J") + "(?s:.*)idle")
                if ended_by == "server":
                    server.close()
                    wait_for("no answer from")
                else:
                    process.send_signal(signal.SIGINT)
                assert process.wait(30) == code
            finally:
                process.kill()
                os.close(ours)
    assert "Traceback" not in seen
