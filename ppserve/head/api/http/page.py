"""GET / and GET /state.json: the page that asks this server, and what it shows of the pipelines beside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ppserve.head.api.http.openapi import HttpPath
from ppserve.head.api.http.responses import JsonResponse
from ppserve.head.api.request_handler import RequestHandler
from ppserve.head.observe.page import page_of
from ppserve.head.observe.pages import PAGE_HEADERS


@dataclass(frozen=True, slots=True)
class PageState:
    """What the page shows of the pipelines."""

    read: Callable[[], dict[str, Any]]
    """The state of all pipelines. It may wait for the engine."""
    steps_of: Callable[[str, str], list[list[int]]]
    """The latest steps of each replica that computed a caller's call of this name."""

    def paths(self) -> list[HttpPath]:
        """Return the page's paths. The page itself needs no key: it asks for one. Its state does, as its questions
        do."""
        return [
            HttpPath(
                "GET", "/", "Show a page that asks this server.", self._show, content="text/html", is_open=True
            ),
            HttpPath("GET", "/state.json", "Tell what the page shows of the pipelines.", self._tell),
        ]

    async def _show(self, _request: Request, handler: RequestHandler) -> Response:
        """GET /."""
        asks, knows = "text", []
        if handler.template is not None:
            answers = handler.template.answers
            formats = {"thinking": answers.reasoning, "tools": answers.tools}
            asks, knows = "chat", [name for name, known in formats.items() if known is not None]
        page = page_of(asks if handler.description.has_tokenizer else "", handler.keys is not None, knows)
        return Response(page.body, headers={**PAGE_HEADERS, **page.headers}, media_type=page.content_type)

    async def _tell(self, request: Request, _handler: RequestHandler) -> Response:
        """GET /state.json. Beside the state: the steps of the caller's own call that `request` names."""
        caller, name = request.state.call.caller, request.query_params.get("request", "")

        def tell() -> Response:
            own = self.steps_of(caller, name) if name else []
            return JsonResponse({**self.read(), "own": own}, headers=PAGE_HEADERS)

        return await asyncio.to_thread(tell)
