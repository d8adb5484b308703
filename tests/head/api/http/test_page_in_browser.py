"""What the page does in a browser, with a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests import browser
from tests.fake_engine import FakeEngine
from tests.head.api.http.asking import ANSWER, ROOMY, TOOL_TEMPLATE
from tests.head.api.http.page_rig import KEY, with_page

needs_chromium = pytest.mark.skipif(browser.EXECUTABLE is None, reason="needs chromium, which is not installed")

SEND = "byId('send').click()"
DONE = "byId('stop').disabled && !byId('send').disabled && latest !== null"


def answer_text() -> str:
    return "[...document.querySelectorAll('.turn.assistant')].at(-1).querySelector('.who ~ div').textContent"


async def in_browser(look: Callable[[browser.Page], None]) -> None:
    """Run `look` in a thread: the server lives in this one's event loop."""

    def run() -> None:
        with browser.chromium() as page:
            look(page)

    await asyncio.to_thread(run)


def requested_hosts(page: browser.Page) -> set[str]:
    found = page.evaluate(
        "performance.getEntries().filter((e) => e.name.includes('://')).map((e) => new URL(e.name).host)"
    )
    return set(found)


@pytest.mark.slow
@needs_chromium
@pytest.mark.timeout(120)
async def test_a_chat_streams_is_asked_again_and_can_be_had_with_curl(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with with_page(tmp_path, engine) as served:
        address = f"http://127.0.0.1:{served.port}"

        def look(page: browser.Page) -> None:
            page.resize(1600, 900)
            page.open(address + "/")
            page.wait_for("byId('contact').textContent === 'serving'")
            page.evaluate("byId('max_tokens').value = '7'; byId('temperature').value = '0.5'")
            page.evaluate(f"byId('prompt').value = 'hi <b>'; {SEND}")
            page.wait_for(DONE)
            first = page.evaluate(answer_text())
            assert len(first) == 7
            assert page.evaluate("document.querySelector('.turn.user').textContent").endswith("hi <b>")
            assert "7 tokens, first token after" in page.evaluate("byId('figures').textContent")
            page.evaluate("byId('again').click()")
            page.wait_for("document.querySelector('.end')?.textContent.startsWith('the same answer')")
            assert page.evaluate(answer_text()) == first
            curl = page.evaluate("byId('curl').querySelector('pre').textContent")
            assert f"curl -sN {address}/v1/chat/completions " in curl
            told = json.loads(curl.partition(" -d '")[2].removesuffix("'"))
            assert told == {
                "messages": [{"role": "user", "content": "hi <b>"}],
                "temperature": 0.5,
                "max_tokens": 7,
                "seed": page.evaluate("latest.seed"),
                "stream": True,
            }
            # The next message carries the chat so far.
            page.evaluate(f"byId('prompt').value = 'more'; {SEND}")
            page.wait_for(f"turns.length === 4 && {DONE}")
            assert page.complaints == []
            assert requested_hosts(page) == {f"127.0.0.1:{served.port}"}

        await in_browser(look)
    first, again, more = engine.requests
    assert first.sampling == again.sampling
    assert first.prompt_ids == again.prompt_ids == more.prompt_ids[: len(first.prompt_ids)]


@pytest.mark.slow
@needs_chromium
@pytest.mark.timeout(120)
async def test_a_completion_is_stopped_and_its_text_kept(tmp_path: Path) -> None:
    async with with_page(tmp_path, FakeEngine(halt_after=3)) as served:

        def look(page: browser.Page) -> None:
            page.resize(390, 800, phone=True)
            page.open(f"http://127.0.0.1:{served.port}/")
            page.evaluate("document.querySelector('input[value=text]').click()")
            page.evaluate("byId('prompt').focus(); byId('prompt').value = 'Once'")
            page.press("Enter", "\r")
            page.wait_for("document.querySelector('.turn.assistant')?.textContent.includes('Once')")
            page.wait_for(f"{answer_text()}.length === 7")
            page.press("Escape")
            page.wait_for("document.querySelector('.end')?.textContent === 'stopped'")
            page.wait_for(DONE)
            assert len(page.evaluate(answer_text())) == 7, "three tokens behind the prompt"
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            assert page.complaints == []

        await in_browser(look)


@pytest.mark.slow
@needs_chromium
@pytest.mark.timeout(120)
async def test_a_key_is_asked_for_kept_in_the_tab_and_forgotten_when_wrong(tmp_path: Path, keys: Path) -> None:
    async with with_page(tmp_path, api_key_file=keys) as served:

        def look(page: browser.Page) -> None:
            address = f"http://127.0.0.1:{served.port}/"
            page.open(address)
            page.wait_for("byId('contact').textContent === 'needs a key' && !byId('key-form').hidden")
            assert page.evaluate("byId('pipeline').hidden"), "there is nothing to show yet"
            assert page.complaints == [], "nothing was asked for without a key"
            give = "byId('key').value = {!r}; byId('key-form').querySelector('button').click()"
            page.evaluate(give.format("a “pasted” key"))
            page.wait_for("byId('key-problem').textContent.includes('ASCII')")
            page.evaluate(give.format("no key of theirs"))
            page.wait_for("!byId('key-form').hidden && byId('key-problem').textContent.includes('does not know')")
            assert page.evaluate("sessionStorage.length") == 0
            page.evaluate(give.format(KEY))
            page.wait_for("byId('contact').textContent === 'serving' && byId('key-form').hidden")
            page.open(address)
            page.wait_for("byId('contact').textContent === 'serving'")
            page.evaluate(f"byId('max_tokens').value = '5'; byId('prompt').value = 'hi'; {SEND}")
            page.wait_for(DONE)
            assert len(page.evaluate(answer_text())) == 5
            assert "$PPSERVE_API_KEY" in page.evaluate("byId('curl').textContent")
            assert KEY not in page.evaluate("document.documentElement.outerHTML")
            assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]

        await in_browser(look)


@pytest.mark.slow
@needs_chromium
@pytest.mark.timeout(120)
async def test_errors_are_told_where_the_answer_would_be(tmp_path: Path) -> None:
    async with with_page(tmp_path) as served:

        def look(page: browser.Page) -> None:
            page.open(f"http://127.0.0.1:{served.port}/")
            page.evaluate(f"byId('temperature').value = '-1'; byId('prompt').value = 'hi'; {SEND}")
            page.wait_for("document.querySelector('.end')?.getAttribute('role') === 'alert'")
            assert "temperature" in page.evaluate("document.querySelector('.end').textContent")
            assert page.evaluate("[byId('send').disabled, byId('prompt').value, turns.length]") == [False, "hi", 0]

        await in_browser(look)


TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]
MESSAGES = "[...document.querySelectorAll('.turn')].map((turn) => turn.firstChild.textContent)"


@pytest.mark.slow
@needs_chromium
@pytest.mark.timeout(180)
async def test_thoughts_and_calls_are_shown_and_what_a_call_gave_is_asked_for(tmp_path: Path) -> None:
    engine = FakeEngine(ROOMY, said=ANSWER.encode())
    async with with_page(tmp_path, engine, TOOL_TEMPLATE) as served:

        def look(page: browser.Page) -> None:
            page.resize(390, 800, phone=True)
            page.open(f"http://127.0.0.1:{served.port}/")
            page.wait_for("byId('contact').textContent === 'serving'")
            page.evaluate(f"byId('tools').value = '{{'; byId('prompt').value = 'hi'; {SEND}")
            assert page.evaluate("document.activeElement.id") == "tools"
            assert page.evaluate("byId('tools-problem').textContent").startswith("The tools are not JSON: ")
            assert page.evaluate("turns.length + document.querySelectorAll('.turn').length") == 0
            page.evaluate(f"byId('tools').value = {json.dumps(json.dumps(TOOLS))}; byId('thinking').value = 'on'")
            page.evaluate(SEND)
            page.wait_for(DONE)
            thought = "document.querySelector('.thought')"
            assert page.evaluate(f"[{thought}.open, {thought}.textContent]") == [
                False,
                "What the model thoughtHm.",
            ]
            assert page.evaluate("[...document.querySelectorAll('.call')].map((call) => call.textContent)") == [
                'calls weather({"city": "Bern"})',
                "calls time({})",
            ]
            page.evaluate(f"{thought}.querySelector('summary').focus()")
            page.press("Enter", "\r")
            page.wait_for(f"{thought}.open")
            if browser.AXE is not None:
                for scheme, width in (("light", 390), ("dark", 1600)):
                    page.prefer(scheme)
                    page.resize(width, 900)
                    assert page.violations() == [], (scheme, width)
            page.evaluate("byId('again').click()")
            page.wait_for("document.querySelector('.end')?.textContent.startsWith('the same answer')")
            for name, result in (("weather", "rain"), ("time", "noon")):
                assert page.evaluate("byId('prompt-label').textContent") == f"Result of {name}"
                page.evaluate(f"byId('prompt').value = {result!r}; {SEND}")
            page.wait_for(f"turns.length === 5 && {DONE}")
            assert page.evaluate(MESSAGES) == ["you", "model", "result of weather", "result of time", "model"]
            assert page.complaints == []

        await in_browser(look)
    first, again, after = (bytes(i for i in each.prompt_ids if i < 256).decode() for each in engine.requests)
    assert first == again
    assert "hi" in first
    assert "tool:rain" in after
    assert "tool:noon" in after
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>' in after


LONG = "x" * 300
WIDE = f"<think>{LONG} {LONG}</think>{LONG}\n\n`{LONG}`\n\n```\n{LONG}\n```\n\n"
WIDE += f"| {LONG} | b |\n|---|---|\n| 1 | {LONG} |\n\n"
WIDE += f'<tool_call>{{"name": "time", "arguments": {{"a": "{LONG}"}}}}</tool_call>'


@pytest.mark.slow
@needs_chromium
@pytest.mark.timeout(180)
async def test_no_answer_is_wider_than_the_window(tmp_path: Path) -> None:
    engine = FakeEngine(replace(ROOMY, name="n" * 120), said=WIDE.encode())
    async with with_page(tmp_path, engine, TOOL_TEMPLATE) as served:

        def look(page: browser.Page) -> None:
            page.open(f"http://127.0.0.1:{served.port}/")
            page.wait_for("byId('contact').textContent === 'serving'")
            page.evaluate(f"byId('tools').value = {json.dumps(json.dumps(TOOLS))}")
            page.evaluate("byId('max_tokens').value = 3000")
            page.evaluate(f"byId('prompt').value = {LONG!r}; {SEND}")
            page.wait_for(DONE)
            page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
            assert (
                page.evaluate("document.querySelectorAll('.thought, .call, .turn table, .turn pre').length") == 4
            )
            for width in browser.WIDTHS:
                assert page.fits(width), width
                assert page.evaluate("byId('log').scrollWidth <= byId('log').clientWidth"), width

        await in_browser(look)


@pytest.mark.slow
@needs_chromium
@pytest.mark.timeout(120)
async def test_thoughts_are_open_until_the_answer_begins_and_go_back_with_it(tmp_path: Path) -> None:
    thinking = b"<think>One.\nTwo.</think>Done."
    async with with_page(tmp_path, FakeEngine(ROOMY, said=thinking, halt_after=16), TOOL_TEMPLATE) as served:

        def look(page: browser.Page) -> None:
            page.open(f"http://127.0.0.1:{served.port}/")
            page.wait_for("byId('contact').textContent === 'serving'")
            page.evaluate(f"byId('prompt').value = 'hi'; {SEND}")
            page.wait_for("document.querySelector('.thought[open]')?.textContent.includes('Two.')")
            assert page.evaluate("document.querySelector('.thought summary').textContent") == "The model thinks"
            assert page.evaluate(f"{answer_text()}") == ""
            page.press("Escape")
            page.wait_for(DONE)
            assert page.evaluate("turns.at(-1)") == {
                "role": "assistant", "content": "", "reasoning_content": "One.\nTwo.",
            }  # fmt: skip

        await in_browser(look)


MARKDOWN = """# Title <b>

A *word* and **two** with `code <i>` and [a link](https://example.com/a?b=c) and [none](javascript:alert(1)).
<img src=x onerror=alert(1)> ![picture](https://example.com/x.png)

1. first
2. second
   - inner

| a | b |
|---|---|
| 1 | **2** |

> quoted

```python
print("<script>alert(1)</script>")
"""


@pytest.mark.slow
@needs_chromium
@pytest.mark.timeout(120)
async def test_markdown_becomes_elements_and_markup_stays_text(tmp_path: Path) -> None:
    async with with_page(tmp_path) as served:

        def look(page: browser.Page) -> None:
            page.open(f"http://127.0.0.1:{served.port}/")
            page.evaluate(
                f"window.into = newTurn('model', 'assistant'); showMarkdown(into, {json.dumps(MARKDOWN)})"
            )
            tags = page.evaluate("[...into.querySelectorAll('*')].map((e) => e.localName)")
            assert not {"b", "i", "img", "script"} & set(tags)
            assert {"h3", "em", "strong", "ol", "ul", "li", "table", "blockquote", "pre", "button"} <= set(tags)
            assert page.evaluate("[...into.querySelectorAll('a')].map((a) => a.href)") == [
                "https://example.com/a?b=c",
                "https://example.com/x.png",
            ]
            assert "onerror=alert(1)>" in page.evaluate("into.textContent")
            code = page.evaluate("into.querySelector('pre').textContent")
            assert code == 'print("<script>alert(1)</script>")\n'
            # Text that comes leaves the blocks before it as they are.
            page.evaluate(
                "window.heading = into.firstChild; showMarkdown(into, into.given = '# Title <b>\\n\\nnew')"
            )
            assert page.evaluate("into.firstChild === heading && into.children.length") == 2
            # Any text is shown, however far it is from markdown.
            odds = [
                "```",
                "* ",
                "[](",
                "|\n|-",
                "> > > x",
                "**" * 400,
                "[a](" * 1000,
                "- " * 300,
                "`" * 50,
                "1." * 99,
            ]
            for odd in odds:
                page.evaluate(f"showMarkdown(into, {json.dumps(odd)})")
            assert page.complaints == []
            assert requested_hosts(page) == {f"127.0.0.1:{served.port}"}

        await in_browser(look)
