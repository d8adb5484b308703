"""The page on the HTTP port: what serves it, and who may see it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.head.api.http.asking import TOOL_TEMPLATE, Served, served_http
from tests.head.api.http.page_rig import KEY, PAGE, asked_for, with_page


async def test_the_page_may_run_its_own_script_and_ask_its_own_origin_alone(tmp_path: Path) -> None:
    async with with_page(tmp_path) as served:
        page = await served.ask("/")
        state = await served.ask("/state.json?request=mine")
        counted = Counter(served.counted)
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["cache-control"] == state.headers["cache-control"] == "no-store"
    assert b'data-asks="chat" data-wants-key="false" data-knows=""' in page.body
    assert (state.json["own"], state.json["status"]) == ([[1, 3]], "serving")
    assert counted == {("/", 200): 1, ("/state.json", 200): 1}


async def test_with_keys_the_page_loads_without_one_and_its_state_does_not(tmp_path: Path, keys: Path) -> None:
    async with with_page(tmp_path, api_key_file=keys) as served:
        page = await served.ask("/")
        assert page.status == 200
        assert b'data-wants-key="true"' in page.body
        asked_for.clear()
        assert (await served.ask("/state.json?request=mine")).status == 401
        assert (await served.ask("/state.json?request=mine", authorization="Bearer wrong")).status == 401
        assert asked_for == []
        state = await served.ask("/state.json?request=mine", authorization=f"Bearer {KEY}")
        assert state.json["own"] == [[1, 3]]
        ((caller, name),) = asked_for
        assert (caller[:4], name) == ("key:", "mine")
        described = (await served.ask("/openapi.json", authorization=f"Bearer {KEY}")).json["paths"]
        assert "security" not in described["/"]["get"]
        assert described["/state.json"]["get"]["security"]


async def test_no_page_is_no_page(served: Served) -> None:
    for path in ("/", "/state.json"):
        answer = await served.ask(path)
        assert (answer.status, answer.json["error"]["code"]) == (404, "not_found")


async def test_the_page_knows_what_it_can_ask_for(tmp_path: Path) -> None:
    async with served_http(page=PAGE) as served:
        assert b'data-asks="text"' in (await served.ask("/")).body
    async with with_page(tmp_path, template=TOOL_TEMPLATE) as served:
        assert (
            b'data-asks="chat" data-wants-key="false" data-knows="thinking tools"' in (await served.ask("/")).body
        )
