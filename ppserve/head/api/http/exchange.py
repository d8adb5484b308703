"""One request on an HTTP connection and its answer: whose it is, until when it waits, its body, what goes back."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TypeVar

import msgspec
from starlette.types import Message, Receive, Scope, Send

from ppserve.errors import InvalidRequest, RequestError, Violation
from ppserve.head.api.auth import bearer_key, caller_name
from ppserve.head.api.call import Call
from ppserve.head.api.http.failures import Headers, HttpError, content_of, headers_of, status_of
from ppserve.head.api.request_handler import RequestHandler, run_in_thread_if_long

MAX_BODY_BYTES = 1 << 20
BODY_WITHIN_S = 30.0
# A reader who has stalled may not read of the error either.
ERROR_WITHIN_S = 1.0
MAX_TIMEOUT_S = 86_400.0

B = TypeVar("B")


class Exchange:
    """call: as the request handler knows it. status: of the answer, None before it begins."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_handler: RequestHandler) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._is_stream = False
        self.status: int | None = None
        self.key = bearer_key(self.header("authorization"))
        checked_key = self.key if request_handler.keys is not None else None
        host = (scope["client"] or ("", 0))[0]
        caller = caller_name(checked_key, scope["state"]["certificate"], host)
        call = Call.begin(caller, None, self.header("traceparent") or None)
        call = request_handler.name(call, self.header("x-request-id"))
        # Every reader of JSON holds 53 bits of a number.
        self.call = replace(call, seed=call.seed >> 11)

    def limited(self) -> asyncio.Timeout:
        """A context with the caller's time limit, which starts now. Raises InvalidRequest."""
        text = self.header("x-request-timeout")
        if not text:
            return asyncio.timeout(None)
        try:
            seconds = math.nan if "_" in text else float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= MAX_TIMEOUT_S:
            problem = f"not a number of seconds above 0, up to {MAX_TIMEOUT_S:g}"
            raise InvalidRequest([Violation("x-request-timeout", problem)])
        self.call = self.call.within(seconds)
        return asyncio.timeout(seconds)

    def header(self, name: str) -> str:
        """The first header of this name, or nothing."""
        wanted = name.encode()
        return next((value.decode("latin-1") for key, value in self._scope["headers"] if key == wanted), "")

    def path_parameter(self, name: str) -> str:
        """A variable part of the path, by its name in the route."""
        return str(self._scope["path_params"][name])

    # ---- what comes in --------------------------------------------------------------------------------

    async def read(self, decoder: msgspec.json.Decoder[B], within_s: float = BODY_WITHIN_S) -> B:
        """The body. Raises InvalidRequest, or HttpError for one that is too long or too slow."""
        announced = self.header("content-length")
        if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
            raise _too_long()
        body = bytearray()
        try:
            async with asyncio.timeout(within_s) as limit:
                more = True
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise asyncio.CancelledError
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > MAX_BODY_BYTES:
                        raise _too_long()
        except TimeoutError:
            if not limit.expired():
                raise
            raise HttpError(408, "BODY_TIMEOUT", f"the body did not come within {within_s:g} s") from None
        # `aside` counts characters to tokenize; decoding JSON is some 16 times as fast.
        return await run_in_thread_if_long(len(body) // 16, lambda: _decoded(decoder, bytes(body)))

    @asynccontextmanager
    async def attended(self) -> AsyncIterator[None]:
        """The block is cancelled when the caller hangs up. Enter it when the body was read."""
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.create_task(self._until_gone(task))
        try:
            yield
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch

    async def _until_gone(self, task: asyncio.Task[object]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    # ---- what goes out --------------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        """Of ASGI; notes the status."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)

    async def answer(self, content: bytes, status: int = 200, headers: Headers = ()) -> None:
        """All of the answer, which is JSON."""
        own = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await self._begin(status, [*own, *headers])
        await self._send({"type": "http.response.body", "body": content})

    async def event(self, content: bytes) -> None:
        """One server-sent event; the first begins the answer: until then, errors can be told by a status. Waits
        while the connection's buffer is full."""
        if self.status is None:
            self._is_stream = True
            own = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            # Asks nginx not to wait for more before it hands an event on.
            await self._begin(200, [*own, (b"x-accel-buffering", b"no")])
        await self._send({"type": "http.response.body", "body": b"data: %b\n\n" % content, "more_body": True})

    async def end_events(self) -> None:
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def fail(self, error: RequestError) -> None:
        """End the answer with an error, in the form that what was sent so far allows."""
        if self.status is None:
            await self.answer(content_of(error), status_of(error), headers_of(error))
        elif self._is_stream:
            try:
                async with asyncio.timeout(ERROR_WITHIN_S):
                    await self.event(content_of(error))
                    await self.end_events()
            except TimeoutError:
                self.abort()
        else:
            self.abort()

    def abort(self) -> None:
        """End the connection. Nothing more is sent, whatever is waiting to be."""
        self._scope["state"]["abort"]()

    async def _begin(self, status: int, headers: Headers) -> None:
        names = [(name.encode(), value.encode()) for name, value in self.call.names]
        await self.send({"type": "http.response.start", "status": status, "headers": [*headers, *names]})


def _decoded(decoder: msgspec.json.Decoder[B], body: bytes) -> B:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$.")
        raise InvalidRequest([Violation(path.rstrip("`") or "body", problem)]) from error
    except msgspec.DecodeError as error:
        why = str(error).removeprefix("JSON is malformed: ")
        raise InvalidRequest([Violation("body", f"not JSON: {why}")]) from error
    except (UnicodeDecodeError, RecursionError) as error:
        problem = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "nested too deeply"
        raise InvalidRequest([Violation("body", problem)]) from error


def _too_long() -> HttpError:
    return HttpError(413, "BODY_TOO_LONG", f"the body has more than {MAX_BODY_BYTES} bytes")
