"""Web pages of other origins: what a browser is told, and one that asks."""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import browser
from tests.head.api.http.asking import TEMPLATE, Served, served_http

OURS, OTHER = "https://ours.example", "https://other.example"
COMPLETIONS = "/v1/completions"
ASKS = {
    "access_control_request_method": "POST",
    "access_control_request_headers": "authorization,content-type,x-stainless-os",
}


async def test_without_origins_no_page_is_told_anything(served: Served) -> None:
    preflight = await served.ask(COMPLETIONS, method="OPTIONS", origin=OURS, **ASKS)
    answer = await served.ask(COMPLETIONS, {"prompt": "a"}, origin=OURS)
    assert (preflight.status, answer.status) == (405, 200)
    for told in (preflight, answer):
        assert not any(name.startswith("access-control") or name == "vary" for name in told.headers)


@pytest.mark.parametrize("origins", [("*",), (OURS, "null")])
async def test_pages_of_these_origins_may_ask_and_read(keys: Path, origins: tuple[str, ...]) -> None:
    allowed = "*" if origins == ("*",) else OURS
    async with served_http(cors_origin=origins, api_key_file=keys) as served:
        preflight = await served.ask(COMPLETIONS, method="OPTIONS", origin=OURS, **ASKS)
        assert preflight.status == 200, "it has no key"
        assert preflight.headers["access-control-allow-origin"] == allowed
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert set(ASKS["access_control_request_headers"].split(",")) <= set(
            preflight.headers["access-control-allow-headers"].split(",")
        )
        known = {"origin": OURS, "authorization": "Bearer 0123456789abcdef"}
        answers = [
            await served.ask(COMPLETIONS, {"prompt": "a"}, **known),
            await served.ask(COMPLETIONS, {"prompt": "a", "stream": True}, **known),
            await served.ask(COMPLETIONS, {"prompt": "a", "top_p": 7}, **known),
            await served.ask("/nothing", **known),
            await served.ask(COMPLETIONS, {"prompt": "a"}, origin=OURS),
        ]
        assert [answer.status for answer in answers] == [200, 200, 400, 404, 401]
        for answer in answers:
            assert answer.headers["access-control-allow-origin"] == allowed
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
            assert "retry-after" in answer.headers["access-control-expose-headers"]
            assert "origin" in answer.headers["vary"].lower(), "caches keep answers to others apart"
            assert "access-control-allow-credentials" not in answer.headers
        assert served.counted[COMPLETIONS, 401] == served.counted["other", 200] == 1


async def test_pages_of_other_origins_may_not() -> None:
    async with served_http(cors_origin=(OURS,)) as served:
        preflight = await served.ask(COMPLETIONS, method="OPTIONS", origin=OTHER, **ASKS)
        assert (preflight.status, preflight.json["error"]["code"]) == (400, "cors")
        assert "--cors-origin" in preflight.json["error"]["message"]
        assert "access-control-allow-origin" not in preflight.headers
        answer = await served.ask(COMPLETIONS, {"prompt": "a"}, origin=OTHER)
        assert answer.status == 200, "the browser keeps it from the page"
        assert "access-control-allow-origin" not in answer.headers
        assert served.counted == {("other", 400): 1, (COMPLETIONS, 200): 1}


PAGE = """\
<script>
async function ask(url, key) {
    const headers = {authorization: "Bearer " + key, "content-type": "application/json"}
    const body = JSON.stringify({messages: [{role: "user", content: "hi"}], stream: true, max_tokens: 6, seed: 3})
    try {
        const answer = await fetch(url, {method: "POST", headers, body})
        const text = await answer.text()
        const events = text.split("\\n\\n").filter(line => line.startsWith("data: {"))
        const deltas = events.map(event => JSON.parse(event.slice(6)).choices?.[0].delta.content ?? "")
        return [answer.status, answer.headers.get("x-request-id"), deltas.join("")]
    } catch (error) {
        return [0, null, String(error)]
    }
}
</script>"""


class _Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE.encode())

    def log_message(self, *_parts: object) -> None:
        pass


@contextmanager
def page_server() -> Iterator[str]:
    """The origin of a page that can ask."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
@pytest.mark.skipif(browser.EXECUTABLE is None, reason="needs Chromium")
async def test_a_page_in_a_browser_reads_a_streamed_chat(keys: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)

    def ask(origin: str, asked: list[tuple[int, str]]) -> list[list[object]]:
        with browser.chromium() as page:
            page.open(origin + "/")
            urls = [(f"http://127.0.0.1:{port}/v1/chat/completions", key) for port, key in asked]
            return [page.evaluate(f"ask({url!r}, {key!r})") for url, key in urls]

    with page_server() as origin:
        settings = {"api_key_file": keys, "chat_template": tmp_path / "chat.jinja"}
        async with (
            served_http(cors_origin=(origin,), **settings) as allowing,
            served_http(cors_origin=("*",), **settings) as allowing_all,
            served_http(cors_origin=(OURS,), **settings) as refusing,
            served_http(**settings) as silent,
        ):
            servers = (allowing, allowing_all, refusing, silent)
            asked = [(server.port, "0123456789abcdef") for server in servers]
            *told, wrong = await asyncio.to_thread(ask, origin, [*asked, (allowing.port, "a wrong key")])
            expected = await allowing.ask(
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "seed": 3},
                authorization="Bearer 0123456789abcdef",
            )
    text = expected.json["choices"][0]["message"]["content"]
    assert [(status, said) for status, _, said in told[:2]] == [(200, text)] * 2
    assert all(str(name).startswith("req-") for _, name, _ in told[:2])
    assert [status for status, _, _ in told[2:]] == [0, 0]
    assert wrong[0] == 401, "an error can be read as well"
