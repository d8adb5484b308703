"""The page of the metrics port in a browser, in each state of a server that is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from ppserve.core.ledger.account import Settled
from ppserve.core.ledger.causes import HOST, Span
from ppserve.head.engine.member import StageState
from ppserve.head.observe.history import Point
from ppserve.head.observe.live import live_pages, read_state
from ppserve.head.observe.pages import PageServer
from tests import browser
from tests.fake_engine import CARD, READING
from tests.head.api.http.page_rig import LOAD

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(browser.EXECUTABLE is None, reason="needs chromium, which is not installed"),
]

MS = 1_000_000
POINTS = [
    *(Point(float(second), 100.0 + second, 0.05, 2, 0.25) for second in range(100)),
    *(Point(float(second), 0.0, None, 0, None) for second in range(100, 110)),
    *(Point(float(second), 50.0, 0.1, 1, 0.5) for second in range(110, 120)),
]
STARTING = {"status": "starting", "start": "2 of 2 import, compile"}


def state(*, has_work: bool = True, is_away: bool = False) -> dict[str, Any]:
    """The state of one stage, which computes and waits in turn."""
    spans = []
    for step in range(has_work * 20):
        spans += [Settled(0, Span(step * 10 * MS, (step * 10 + 8) * MS, "decode"), step)]
        spans += [Settled(0, Span((step * 10 + 8) * MS, (step * 10 + 10) * MS, HOST), step + 1)]
    reading = replace(READING, now_ns=200 * MS, serves=not is_away)
    if is_away:
        ((member,),) = reading.ranks
        reading = replace(reading, ranks=((replace(member, state=StageState.ABSENT),),))
    points = POINTS if has_work else []
    return read_state((reading,), CARD, LOAD | {"waiting": 3}, [spans], {"metrics": "http:9"}, points)


STATES = {"idle": state(has_work=False), "busy": state(), "recovering": state(is_away=True), "starting": STARTING}


async def with_page(look: Callable[[browser.Page, dict[str, Any]], None], stops: bool = False) -> None:
    """Run `look` in a thread, with a page whose state is what it puts into the dictionary. stops: the server ends
    before."""
    shown: dict[str, Any] = dict(STARTING)
    server = PageServer(live_pages(lambda: shown))
    port = await server.start("127.0.0.1", 0)

    def open_page(page: browser.Page) -> None:
        page.resize(1100, 900)
        page.open(f"http://127.0.0.1:{port}/")
        page.wait_for("byId('contact').textContent === 'starting'")

    with browser.chromium() as page:
        await asyncio.to_thread(open_page, page)
        if stops:
            await server.stop()
        await asyncio.to_thread(look, page, shown)
    await server.stop()


def put(shown: dict[str, Any], of: dict[str, Any]) -> None:
    """Change what is shown at once: a page that is made meanwhile has one state or the other."""
    for name in shown.keys() - of.keys():
        del shown[name]
    shown.update(of)


async def test_the_page_says_how_a_server_starts_and_then_what_it_did_before_it_was_opened() -> None:
    def look(page: browser.Page, shown: dict[str, Any]) -> None:
        assert page.evaluate("byId('start').textContent") == "Ranks: 2 of 2 import, compile"
        assert page.evaluate("byId('pipeline').hidden")
        put(shown, STATES["busy"])
        page.wait_for("byId('contact').textContent === 'serving' && !byId('pipeline').hidden")
        assert page.evaluate("byId('start').textContent") == ""
        assert page.evaluate("byId('history-long').textContent") == "(2 min)"
        pictures = "[...document.querySelectorAll('#history svg')]"
        told = page.evaluate(f"{pictures}.map((p) => p.getAttribute('aria-label'))")
        assert told == [
            "Tokens per second: now 50, at most 199",
            "Time to first token, ms: now 100, at most 100",
            "Requests that wait: now 1, at most 2",
            "Bubbles, of the time with work: now 50.0%, at most 50.0%",
        ]
        lines = page.evaluate(f"{pictures}.map((p) => p.firstChild.getAttribute('d'))")
        # A line has a gap where there was nothing to measure.
        assert [line.count("M") for line in lines] == [1, 2, 1, 2]
        assert [line.count("L") for line in lines] == [119, 108, 119, 108]
        assert lines[0].startswith("M2.5 25.4h0")
        put(shown, STARTING)
        page.wait_for("byId('contact').textContent === 'starting' && byId('pipeline').hidden")
        assert page.complaints == []

    await with_page(look)


async def test_a_stage_that_is_away_is_named_with_those_who_wait_for_it() -> None:
    def look(page: browser.Page, shown: dict[str, Any]) -> None:
        put(shown, STATES["recovering"])
        page.wait_for("byId('contact').textContent === 'recovering'")
        assert page.evaluate("byId('away').textContent").startswith("Stage 0 is away; 3 requests wait.")
        memory = page.evaluate("document.querySelector('.stage').textContent")
        assert "weights " in memory
        assert "KV cache " in memory
        put(shown, STATES["busy"])
        page.wait_for("byId('contact').textContent === 'serving' && byId('away').textContent === ''")

    await with_page(look)


async def test_no_state_is_wider_than_the_window() -> None:
    """The widths tried are also those just below and above where the page is laid out in another way."""

    def look(page: browser.Page, shown: dict[str, Any]) -> None:
        for of in STATES.values():
            put(shown, of)
            page.wait_for(f"byId('contact').textContent === {of['status']!r}")
            page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
            assert [width for width in browser.WIDTHS if not page.fits(width)] == [], of["status"]
        page.evaluate("document.body.append(element('p', 'x'.repeat(300)))")
        assert not page.fits(390), "the test can fail"

    await with_page(look)


async def test_a_server_that_has_gone_is_told_with_what_the_page_does() -> None:
    def look(page: browser.Page, _shown: dict[str, Any]) -> None:
        page.wait_for("byId('contact').textContent === 'unreachable'")
        assert page.evaluate("byId('start').textContent").startswith("The server does not answer. This page asks")

    await with_page(look, stops=True)


@pytest.mark.skipif(browser.AXE is None, reason="needs axe-core: PPSERVE_AXE names its axe.min.js")
@pytest.mark.parametrize("stops", [False, True])
async def test_nothing_keeps_people_from_using_it(stops: bool) -> None:
    """Every state, in both schemes, on a phone and on a wide screen."""

    def look(page: browser.Page, shown: dict[str, Any]) -> None:
        for (name, of), scheme, width in product(STATES.items(), ("light", "dark"), (390, 1600)):
            put(shown, of)
            page.resize(width, 900, phone=width < 600)
            page.prefer(scheme)
            page.wait_for(f"byId('contact').textContent === {'unreachable' if stops else of['status']!r}")
            page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
            assert page.violations() == [], (name, scheme, width)
            assert page.evaluate("document.documentElement.scrollWidth") <= width

    await with_page(look, stops)
