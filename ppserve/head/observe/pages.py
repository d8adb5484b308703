"""The pages of the metrics port, by path: GET and HEAD only.

They are made in threads, because they may wait for the engine's thread, and the event loop must not.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ppserve.errors import RequestError
from ppserve.head.listener import Listener

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
# There are few, so that slow pages take little time from everything else.
_NUM_THREADS = 2
PAGE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Page(NamedTuple):
    content_type: str
    body: bytes
    headers: Mapping[str, str] = {}  # added to `PAGE_HEADERS`, or replacing them


MakePage = Callable[[], Page]


def json_page(ask: Callable[[], object]) -> MakePage:
    """Return a page with the JSON of what `ask` returns whenever the page is asked for."""
    return lambda: Page("application/json", json.dumps(ask()).encode())


class PageServer(Listener):
    def __init__(self, pages: Mapping[str, MakePage]) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="page")
        known = ", ".join(sorted(pages))

        def missing(_request: Request, error: Exception) -> Response:
            assert isinstance(error, HTTPException)
            return PlainTextResponse(
                f"try {known}\n", error.status_code, {**PAGE_HEADERS, **(error.headers or {})}
            )

        routes = [Route(path, self._endpoint(path, make), methods=["GET"]) for path, make in pages.items()]
        app = Starlette(routes=routes, exception_handlers={HTTPException: missing})
        super().__init__(app, "--metrics-port", MAX_CONNECTIONS)

    async def stop(self) -> None:
        await super().stop()
        self._threads.shutdown(wait=False)

    def _endpoint(self, path: str, make: MakePage) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            if request.state.is_surplus:
                headers = {**PAGE_HEADERS, "Retry-After": "1", "Connection": "close"}
                return PlainTextResponse("there are too many connections\n", 503, headers)
            try:
                page = await asyncio.get_running_loop().run_in_executor(self._threads, make)
            except RequestError as error:  # the engine does not serve yet, or no more
                return PlainTextResponse(f"{error}\n", error.http_status, PAGE_HEADERS)
            except Exception:
                log.exception("%s failed", path)
                return PlainTextResponse("see the server's log\n", 500, PAGE_HEADERS)
            return Response(page.body, headers={**PAGE_HEADERS, **page.headers, "Content-Type": page.content_type})

        return answer
