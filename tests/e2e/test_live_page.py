"""The live page in a real browser, while a real server streams."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

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
    for _ in range(4):
        page.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert reached == ["pause", "window", "schedule", "SUMMARY"]
    page.press("Enter", "\r")
    page.wait_for("document.querySelector('details').open")
    cells = page.evaluate("[...document.querySelectorAll('#figures tbody tr')].map((r) => r.children.length)")
    assert cells == [1 + len(KINDS)] * 2

    page.evaluate("byId('schedule').focus()")
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
    os.kill(server.stage_pid(1), signal.SIGKILL)
    page.wait_for("document.querySelectorAll('.stage')[1].textContent.includes('started again 1×')")
    page.wait_for("byId('model').textContent.includes('epoch 2') && !document.querySelector('.dead')")
    page.wait_for("shown.stages.every((stage) => stage.spans.length > 0)")
    assert page.complaints == []


def test_a_server_that_is_gone_is_noticed(page: browser.Page) -> None:
    with serving(1, by=Forked) as short_lived:
        page.open(f"http://{short_lived.metrics}/")
        page.wait_for("byId('contact').textContent === 'live'")
    page.wait_for("byId('contact').textContent.startsWith('no contact')")
    assert page.evaluate("document.body.classList.contains('lost')")
