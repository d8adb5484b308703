"""The live page in a real browser, while a real server streams."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ppserve.core.ledger.causes import KINDS
from tests import browser
from tests.e2e.asking import ask
from tests.e2e.serving import Forked, Server, serving
from tests.e2e.test_losing_stages import long_requests

pytestmark = [
    pytest.mark.skipif(browser.EXECUTABLE is None, reason="needs chromium, which is not installed"),
    pytest.mark.timeout(240),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(2, "--layers", "4,4", by=Forked) as running:
        yield running


@pytest.fixture(scope="module")
def page() -> Iterator[browser.Page]:
    with browser.chromium() as opened:
        yield opened


@pytest.fixture
def streams(server: Server) -> Iterator[None]:
    """32 streams at once, one after the other, for as long as the test looks."""
    enough = threading.Event()

    def load() -> None:
        while not enough.is_set():
            ask(server.grpc, long_requests(32, max_tokens=48), at_once=32)

    thread = threading.Thread(target=load)
    thread.start()
    yield
    enough.set()
    thread.join()


def tile(name: str) -> str:
    """An expression for the value of a tile."""
    found = f"[...document.querySelectorAll('.tile')].find((t) => t.firstChild.textContent === {name!r})"
    return f"{found}?.lastChild.textContent"


@pytest.mark.usefixtures("streams")
def test_the_picture_in_the_readme_can_be_taken_again(server: Server, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "tools/take_screenshot.py", server.http, "--out", str(tmp_path / "page.png")]
    subprocess.run(command, cwd=root, check=True, capture_output=True, timeout=120)
    taken, shown = ((place / "page.png").read_bytes() for place in (tmp_path, root / "docs"))
    assert taken.startswith(b"\x89PNG")
    assert struct.unpack(">II", taken[16:24]) == struct.unpack(">II", shown[16:24]) == (1100, 640)


@pytest.mark.usefixtures("streams")
def test_the_page_shows_what_the_server_does(server: Server, page: browser.Page) -> None:
    page.resize(1100, 900)
    page.open(f"http://{server.metrics}/")
    page.wait_for("document.querySelectorAll('.stage').length === 2")
    page.wait_for(f"Number({tile('Running')}) > 8")
    page.wait_for(f"Number({tile('Tokens per second')}) > 0")
    page.wait_for("byId('interval').textContent.startsWith('last')")

    # Every bar is full, and says in words what it shows.
    widths = page.evaluate(
        "[...document.querySelectorAll('.bar')].map((bar) =>"
        " [...bar.children].reduce((sum, part) => sum + parseFloat(part.style.width), 0))"
    )
    assert widths == pytest.approx([100, 100], abs=0.6)
    spoken = page.evaluate("[...document.querySelectorAll('.bar')].map((bar) => bar.getAttribute('aria-label'))")
    assert all("busy: " in words for words in spoken), spoken

    # The picture is not empty: some of its pixels have the colour of computing.
    page.wait_for("byId('schedule-text').textContent.includes('computations of 2 stages')")
    colours = page.evaluate(
        "(() => { const c = byId('schedule');"
        " const p = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        " const seen = new Set(); for (let i = 0; i < p.length; i += 4) seen.add(p.slice(i, i + 4).join());"
        " return seen.size; })()"
    )
    assert colours > 3

    # It updates by itself.
    before = page.evaluate("readings.at(-1).now_s")
    page.wait_for(f"readings.at(-1).now_s > {before}")
    assert page.complaints == []


@pytest.mark.usefixtures("streams")
def test_by_keyboard_on_a_phone_in_the_dark(server: Server, page: browser.Page) -> None:
    page.resize(360, 800, phone=True)
    page.prefer("dark")
    page.open(f"http://{server.metrics}/")
    page.wait_for("byId('schedule-text').textContent.includes('computations')")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360, "wider than the phone"
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.prefer("light")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != paper

    reached = []
    for _ in range(6):
        page.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert reached == ["other-view", "pause", "window", "schedule", "SUMMARY", "SUMMARY"]
    page.press("Enter", "\r")
    page.wait_for("document.querySelector('#shares').closest('details').open")
    meanings = page.evaluate(
        "[...document.querySelectorAll('#meanings dt')].map((name) => name.nextSibling.textContent)"
    )
    assert len(meanings) == len(KINDS)
    assert all(words.endswith(".") for words in meanings)
    cells = page.evaluate("[...document.querySelectorAll('#shares tbody tr')].map((r) => r.children.length)")
    assert cells == [1 + len(KINDS)] * 2

    page.evaluate("byId('schedule').focus(); byId('window').value = '0.3'")
    page.press("-", "-")
    assert page.evaluate("byId('window').value") == "1"
    page.press(" ", " ")
    page.wait_for("paused && byId('pause').getAttribute('aria-pressed') === 'true'")
    drawn = page.evaluate("shown.now_s")
    page.wait_for(f"readings.at(-1).now_s > {drawn}")
    assert page.evaluate("shown.now_s") == drawn, "a paused picture moved"
    page.press("ArrowLeft")
    assert page.evaluate("panS") == 0.25
    page.press(" ", " ")
    page.wait_for(f"!paused && shown.now_s > {drawn}")
    assert page.complaints == []


@pytest.mark.usefixtures("streams")
def test_a_stage_that_was_replaced_is_told(server: Server, page: browser.Page) -> None:
    page.resize(1100, 900)
    page.open(f"http://{server.metrics}/")
    page.wait_for("document.querySelectorAll('.stage').length === 2")
    killed = server.stage_pid(1)
    # Until it may go on, what would start the stage again holds still.
    keeper = psutil.Process(server.rank_pid(1))
    keeper.suspend()
    try:
        os.kill(killed, signal.SIGKILL)
        page.wait_for("byId('contact').textContent === 'recovering'")
        page.wait_for("byId('away').textContent.startsWith('Stage 1 is away; ')")
        assert "wait" in page.evaluate("byId('away').textContent")
        names = page.evaluate("[...document.querySelectorAll('.stage b')].map((name) => name.textContent)")
        assert names == ["Stage 0 waits for the others", "Stage 1 is away"]
    finally:
        keeper.resume()
    page.wait_for("document.querySelectorAll('.stage')[1].textContent.includes('started again 1×')")
    page.wait_for("byId('model').textContent.includes('epoch 2') && !document.querySelector('.dead')")
    page.wait_for("shown.stages.every((stage) => stage.spans.length > 0)")
    page.wait_for("byId('contact').textContent === 'serving' && byId('away').textContent === ''")
    assert page.complaints == []


def test_an_answer_streams_while_its_slices_are_marked_and_goes_on_behind_a_killed_stage(
    server: Server, page: browser.Page
) -> None:
    page.resize(1600, 900)
    page.open(f"http://{server.http}/")
    page.wait_for("byId('contact').textContent === 'serving'")
    page.evaluate("byId('prompt').value = 'Once upon a time'; byId('seed').value = '7'")
    page.evaluate("byId('max_tokens').value = '400'; byId('send').click()")
    page.wait_for("byId('schedule-text').textContent.includes('with your request')")
    page.wait_for("latest !== null")
    text = page.evaluate("latest.text")
    assert len(text) > 40

    page.evaluate("byId('again').click()")
    page.wait_for("isAsking && document.querySelector('.turn.assistant').textContent.length > 60")
    epoch = page.evaluate("shown.epoch")
    os.kill(server.stage_pid(1), signal.SIGKILL)
    page.wait_for("document.querySelector('.end')?.textContent === 'the same answer, character for character'")
    assert page.evaluate("latest.text") == text
    page.wait_for(f"shown.epoch === {epoch + 1}")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1600
    assert page.complaints == []


def test_a_server_that_is_gone_is_noticed(page: browser.Page) -> None:
    with serving(1, by=Forked) as short_lived:
        page.open(f"http://{short_lived.metrics}/")
        page.wait_for("byId('contact').textContent === 'serving'")
    page.wait_for("byId('contact').textContent.startsWith('unreachable')")
    assert page.evaluate("document.body.classList.contains('lost')")
