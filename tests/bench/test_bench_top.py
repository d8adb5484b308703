"""What `ppserve top` shows: from readings to text, and as a process with and without a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppserve.bench.ledger import shares
from ppserve.bench.top import (
    Figures,
    Line,
    ScrapeFailed,
    ServerReading,
    View,
    bar,
    fetch_figures,
    read,
)
from ppserve.client import Client
from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.causes import CAUSES, MEANINGS
from ppserve.head.observe.metrics import Metrics
from ppserve.v1 import generation_pb2 as pb
from tests.bench.answers import LEDGER, times_of
from tests.commands import run
from tests.fake_engine import FakeEngine, served_in_thread


def topology(busy_s: float, host_s: float, idle_s: float, *states: str) -> pb.GetTopologyResponse:
    """Two stages. states: of both, which are ready unless told."""
    stages = [
        pb.Stage(
            stage=number, device="cpu", layers=f"{4 * number}-{4 * number + 3}", busy_seconds=busy_s,
            bubble_seconds={"host": host_s}, idle_seconds=idle_s, state=state, restarts=number,
        )
        for number, state in enumerate(states or ("ready", "ready"))
    ]  # fmt: skip
    advice, status = "buy a cluster", "recovering" if states else "serving"
    shape: dict[str, Any] = {"transport": "shm", "epoch": 1, "microbatches": 2, "status": status}
    return pb.GetTopologyResponse(stages=stages, advice=advice, **shape)


def text_of(lines: list[Line]) -> list[str]:
    return ["".join(text for _, text in line) for line in lines]


def latencies(*seconds: float) -> Figures:
    bounds_s = [0.1, 0.2, 0.4]
    return {"bounds_s": bounds_s, "counts": [sum(each <= bound for each in seconds) for bound in (*bounds_s, 9)]}


def page(generated: int, ttfts_s: list[float]) -> Figures:
    none = dict.fromkeys(("waiting", "in_flight", "requests", "prompt_tokens"), 0)
    load = {"running": 3, "kv_usage": 0.125, "generated_tokens": generated}
    return {**none, **load, "ttft": latencies(*ttfts_s), "itl": latencies()}


LOST = View(
    ServerReading(1, topology(1, 1, 1), None),
    ServerReading(2, topology(2, 1, 1, "waiting", "away"), None),
)
"""Two readings: in the second one stage 1 is away, and stage 0 waits for it."""
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
    told = LOST.render_line("")
    assert "stage 0 waits for the others: busy" in told
    assert "stage 1 away: busy" in told


def test_a_server_that_began_anew_has_no_negative_rates() -> None:
    before = ServerReading(10.0, topology(100, 50, 0), page(500, [0.3] * 9))
    view = View(before, ServerReading(11.0, topology(1, 0, 0), page(2, [])))
    assert "  0.0 tok/s" in view.render_line("").replace("|", " ")
    assert next(view.stages)[2].computed_ns == 10**9


@pytest.mark.parametrize("width", [40, 60, 80, 131, 200])
def test_the_screen_says_it_all_at_any_width(width: int) -> None:
    lines = text_of(EXAMPLE.render_screen("here:1", width))
    assert max(map(len, lines)) <= width
    bars = [line for line in lines if line.startswith("stage ")]
    assert [len(line) for line in bars] == [width, width]
    told = " ".join(" ".join(lines).split())
    for part in (
        *("ppserve here:1 serving 2 stages over shm", "running 3", "KV 12.5%", "100.0 tok/s", "host 25.0%"),
        *("idle 25.0%", "TTFT p50 150.0 p99 199.0 ms", "ITL -", "50.0% busy", "restarted 1 x", "buy a cluster"),
        *("f fill_drain", "h host", "· idle"),
    ):
        assert part in told


def test_the_screen_colours_kinds_of_time_and_states_and_explains_them_when_asked() -> None:
    words = {text: word for line in EXAMPLE.render_screen("here:1", 80) for word, text in line}
    assert words["serving"] == "good"
    assert (words["h host"], words["hhhhhhhhhhhhhh"], words["█ busy"]) == ("host", "host", "busy")
    lost = [(word, text) for line in LOST.render_screen("here:1", 120) for word, text in line]
    assert {("bad", "recovering"), ("bad", "waits for the others"), ("bad", "away")} <= {*lost}
    explained = EXAMPLE.render_screen("here:1", 60, explains=True)
    assert max(map(len, text_of(explained))) <= 60
    told = " ".join(" ".join(text_of(explained)).split())
    for cause in CAUSES:
        assert f"{cause}: {MEANINGS[cause].what}. {MEANINGS[cause].helps}." in told


def test_one_stage_alone_and_bars() -> None:
    assert text_of([bar(LEDGER[0], 10), bar(times_of(0, {}, 0), 5)]) == ["██████fh··", "·····"]
    alone = pb.GetTopologyResponse(
        stages=[pb.Stage(state="ready")], transport="local", microbatches=1, epoch=1, status="serving"
    )
    view = View(ServerReading(1, alone, None), ServerReading(2, alone, None))
    line, *_ = text_of(view.render_screen("a:1", 120))
    assert line == "ppserve a:1  serving  1 stage over local  up to 1 microbatch  epoch 1"


def test_a_metrics_page_that_went_away_is_visible_until_it_is_back() -> None:
    readings = [
        ServerReading(1, topology(1, 1, 1), page(5, [])),
        ServerReading(2, topology(2, 1, 1), None, "http://here:1/metrics: refused"),
        ServerReading(3, topology(3, 1, 1), page(7, [])),
        ServerReading(4, topology(4, 1, 1), page(8, [])),
    ]
    lines = [View(a, b).render_line("") for a, b in pairwise(readings)]
    assert [line.count("no metrics: http://here:1/metrics: refused") for line in lines] == [1, 1, 0]
    assert "no metrics: http" in "\n".join(text_of(View(*readings[:2]).render_screen("here:1", 120)))


times = st.builds(
    lambda busy, bubbles, idle: times_of(busy, dict(zip(CAUSES, bubbles, strict=True)), idle),
    st.floats(0, 100), st.lists(st.floats(0, 100), min_size=6, max_size=6), st.floats(0, 100),
)  # fmt: skip


@given(times, st.integers(1, 200))
def test_a_bar_is_as_wide_as_asked_and_true_to_a_cell(stage: StageTimes, width: int) -> None:
    (drawn,) = text_of([bar(stage, width)])
    assert len(drawn) == width
    glyphs = dict(zip(("busy", *CAUSES, "idle"), "█fixrhg·", strict=True))
    assert sum(share for _, share in shares(stage).items()) == pytest.approx(1)
    for kind, share in shares(stage).items():
        assert abs(drawn.count(glyphs[kind]) - share * width) <= 1 + 1e-6


# ---- the figures -----------------------------------------------------------------------------------------------


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
        ("127.0.0.1:1", "none", "no server at 127.0.0.1:1; start one with: ppserve serve --model smollm2"),
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


@pytest.mark.parametrize("has_metrics", [False, True])
def test_the_server_says_where_its_metrics_are(has_metrics: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    engine = FakeEngine()
    with served_in_thread(engine, metrics_port=port if has_metrics else 0) as target, Client(target) as client:
        reading = read(client, target, None)
        assert reading.problem.startswith(f"http://127.0.0.1:{port}/load.json: " if has_metrics else "")
        assert bool(reading.problem) == has_metrics
        assert read(client, target, "").problem == ""
        assert read(client, target, "127.0.0.1:1").problem.startswith("http://127.0.0.1:1/")


class Watching:
    """`ppserve top` on a terminal of its own."""

    def __init__(self, target: str, columns: int = 80) -> None:
        self._terminal, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        command = [sys.executable, "-m", "ppserve", *flags(target)]
        environment = {**os.environ, "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        self.seen = ""

    def until(self, text: str) -> str:
        """Read up to this text, and return what was written before it, with its codes."""
        until_s = time.monotonic() + 60
        while (at := self.seen.find(text)) < 0:
            assert time.monotonic() < until_s, self.seen
            if select.select([self._terminal], [], [], 1.0)[0]:
                self.seen += os.read(self._terminal, 65536).decode(errors="replace")
        before, self.seen = self.seen[:at], self.seen[at + len(text) :]
        return before

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)


@pytest.fixture
def watching(target: str) -> Iterator[Watching]:
    screen = Watching(target)
    yield screen
    screen.close()


@pytest.mark.slow
@pytest.mark.parametrize("ended_by", ["q", "\x03", signal.SIGINT])
def test_a_screen_explains_itself_until_a_key_ends_it(watching: Watching, ended_by: str | signal.Signals) -> None:
    shown = watching.until("q ends, ? explains")
    assert "\x1b[?1049h" in shown, "what was on the terminal comes back afterwards"
    assert re.search(r"\x1b\[[0-9;]*m█", shown), "in colour"
    watching.type("?")
    watching.until("stages wait for tokens on their way back")
    watching.type("?")
    watching.until("explains")
    if isinstance(ended_by, str):
        watching.type(ended_by)
    else:
        watching.process.send_signal(ended_by)
    assert watching.process.wait(30) == 0
    assert "Traceback" not in watching.until("\x1b[?1049l")


@pytest.mark.slow
def test_a_screen_ends_with_the_server_and_says_so() -> None:
    with contextlib.ExitStack() as server:
        screen = Watching(server.enter_context(served_in_thread(FakeEngine())), columns=60)
        try:
            screen.until("q ends")
            server.close()
            assert "Traceback" not in screen.until("no server at")
            assert screen.process.wait(30) == 1
        finally:
            screen.close()
