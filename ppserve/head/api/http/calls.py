"""What surrounds a request over HTTP: whose it is, until when it waits, its body, and the forms of its answers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ppserve.errors import DeadlinePassed, InvalidRequest, Violation
from ppserve.head.api.auth import bearer_key, caller_name
from ppserve.head.api.call import Call
from ppserve.head.api.http.failures import HttpError
from ppserve.head.api.http.fields import Body, Table, parse_body
from ppserve.head.api.request_handler import RequestHandler, run_in_thread_if_long

MAX_BODY_BYTES = 1 << 20
MAX_TIMEOUT_S = 86_400.0

encode = msgspec.json.Encoder().encode


def begin_call(request: Request, handler: RequestHandler) -> Call:
    """The call as the request handler knows it, under a name of ours."""
    key = key_of(request) if handler.keys is not None else None
    tls = request.state.transport.get_extra_info("ssl_object")
    certificate = tls.getpeercert(binary_form=True) if tls is not None else None
    host = request.client.host if request.client is not None else ""
    call = Call.begin(caller_name(key, certificate or b"", host), None, request.headers.get("traceparent"))
    # Every reader of JSON holds 53 bits of a number.
    return replace(call, seed=call.seed >> 11)


def name_call(request: Request, handler: RequestHandler) -> None:
    """The call gets the name that its caller, or a proxy, gave it. Raises InvalidRequest for an unfit one."""
    name, max_bytes = request.headers.get("x-request-id", ""), handler.description.limits.max_request_id_bytes
    with handler.counting_refusals():
        request.state.call = request.state.call.named(name, max_bytes, "x-request-id")


def key_of(request: Request) -> str | None:
    return bearer_key(request.headers.get("authorization", ""))


@asynccontextmanager
async def time_limit(request: Request) -> AsyncIterator[None]:
    """The caller's time limit, for the block and for its call. Raises InvalidRequest, DeadlinePassed."""
    text = request.headers.get("x-request-timeout")
    if not text:
        yield
        return
    try:
        seconds = math.nan if "_" in text else float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        problem = f"not a number of seconds above 0, up to {MAX_TIMEOUT_S:g}"
        raise InvalidRequest([Violation("x-request-timeout", problem)])
    request.state.call = request.state.call.within(seconds)
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlinePassed("the caller's time limit passed") from None


@asynccontextmanager
async def ended_by_hang_up(request: Request) -> AsyncIterator[None]:
    """Ends the block with ClientDisconnect when the caller hangs up. Enter it when the body was read."""
    task, has_gone = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal has_gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        has_gone = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not has_gone:
            raise
        task.uncancel()
        raise ClientDisconnect from None
    finally:
        watching.cancel()


async def read_body(request: Request, table: Table) -> Body:
    """The body's fields. Raises InvalidRequest, or HttpError for a body that is too long."""
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > MAX_BODY_BYTES:
            raise HttpError(413, "BODY_TOO_LONG", f"the body has more than {MAX_BODY_BYTES} bytes")
    # The limit counts characters to tokenize; decoding JSON is some 16 times as fast.
    return await run_in_thread_if_long(len(content) // 16, lambda: parse_body(bytes(content), table))


class JsonResponse(Response):
    """An answer that is complete. Its content is encoded already, or by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else encode(content)


class EventStream(StreamingResponse):
    """Server-sent events. Owns what they are made of, and closes it however the answer ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], owned: AsyncExitStack) -> None:
        # The second header asks nginx not to wait for more before it hands an event on.
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        owned.push_async_callback(events.aclose)
        self._owned = owned

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._owned:
                await super().__call__(scope, receive, send)
        except asyncio.CancelledError:
            # The server closes: what is waiting to be sent would keep the connection open.
            scope["state"]["transport"].abort()
