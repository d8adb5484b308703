"""The metrics port over real HTTP; what its pages say is tested where they are made."""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections.abc import Mapping

from ppserve.errors import Draining
from ppserve.head.observe.pages import MAX_CONNECTIONS, MakePage, Page, PageServer, json_page

Answer = tuple[int, dict[str, str], bytes]


def asked(pages: Mapping[str, MakePage], *requests: tuple[str, str]) -> list[Answer]:
    """Answers to (method, path) of a server with these pages."""

    def ask(port: int) -> list[Answer]:
        answers = []
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        for method, path in requests:
            connection.request(method, path)
            answer = connection.getresponse()
            headers = {name.lower(): value for name, value in answer.getheaders()}
            answers.append((answer.status, headers, answer.read()))
        connection.close()
        return answers

    async def main() -> list[Answer]:
        server = PageServer(pages)
        port = await server.start("127.0.0.1", 0)
        try:
            return await asyncio.to_thread(ask, port)
        finally:
            await server.stop()

    return asyncio.run(main())


def test_a_page_has_its_type_and_headers_that_allow_little() -> None:
    own = {"Content-Security-Policy": "default-src 'self'"}
    pages = {"/a.json": json_page(lambda: {"x": 1}), "/b": lambda: Page("text/html", b"<p>", own)}
    (status, headers, body), (_, others, _) = asked(pages, ("GET", "/a.json?y=2"), ("GET", "/b"))
    assert (status, headers["content-type"], body) == (200, "application/json", b'{"x": 1}')
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert others["content-security-policy"] == "default-src 'self'"


def test_paths_and_methods_that_there_are_not() -> None:
    pages = {"/b": json_page(dict), "/a": json_page(dict)}
    missing, posted, head = asked(pages, ("GET", "/nothing"), ("POST", "/a"), ("HEAD", "/a"))
    assert (missing[0], missing[2]) == (404, b"try /a, /b\n")
    assert posted[0] == 405
    assert (head[0], head[1]["content-length"], head[2]) == (200, "2", b"")


def test_a_page_that_fails_fails_alone_and_tells_nothing() -> None:
    def broken() -> Page:
        raise RuntimeError("secret")

    failed, served = asked({"/broken": broken, "/a": json_page(dict)}, ("GET", "/broken"), ("GET", "/a"))
    assert (failed[0], failed[2]) == (500, b"see the server's log\n")
    assert served[0] == 200


def test_a_page_that_the_engine_cannot_tell_says_why() -> None:
    def away() -> Page:
        raise Draining("the server is not serving")

    ((status, _, body),) = asked({"/a": away}, ("GET", "/a"))
    assert (status, body) == (503, b"the server is not serving\n")


async def test_one_connection_too_many_is_told_so() -> None:
    """Pages that wait for the engine, for one, hold their connections."""
    may_go_on = threading.Event()
    server = PageServer({"/slow": lambda: Page("text/plain", b"a" if may_go_on.wait(20) else b"late")})
    port = await server.start("127.0.0.1", 0)

    async def ask(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: here\r\n\r\n".encode())
        return await reader.readuntil(b"\r\n\r\n")

    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS)]
    for connection in opened:  # so the server knows of it
        assert b" 404 " in await ask("/none", *connection)
        assert len(await connection[0].readline()) > 0
    slow = [asyncio.create_task(ask("/slow", *connection)) for connection in opened]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (await ask("/slow", reader, writer)).lower()
    assert (b" 503 " in head, b"\r\nretry-after: 1\r\n" in head) == (True, True)
    assert await reader.read() == b"there are too many connections\n"
    writer.close()
    may_go_on.set()
    assert all(b" 200 " in head for head in await asyncio.gather(*slow))
    for _, writer in opened:
        writer.close()
    await server.stop()


def test_pages_are_not_made_in_the_event_loop() -> None:
    ((_, _, name),) = asked({"/a": json_page(lambda: threading.current_thread().name)}, ("GET", "/a"))
    assert name.startswith(b'"page')
