"""The way of every path that generates: a body's prompts become streams, and their deltas become the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ppserve.errors import InvalidRequest
from ppserve.head.api.call import Call
from ppserve.head.api.http.answers import Answers
from ppserve.head.api.http.bodies import GenerationBody, read_body
from ppserve.head.api.http.responses import EventStream, JsonResponse
from ppserve.head.api.request_handler import RequestHandler, run_in_thread_if_long
from ppserve.head.api.requests import renamed
from ppserve.head.api.stream import Delta, RequestStream, deltas_of, ordered_deltas_of

OpeningStream = AbstractAsyncContextManager[RequestStream]
"""A request that is checked and submitted when the block begins that reads its stream."""


async def generate(
    request: Request, handler: RequestHandler, kind: type[GenerationBody], form: type[Answers]
) -> Response:
    """Answer a body's prompts, whole or as events."""
    with handler.counting_refusals():
        body = await read_body(request, kind, handler)
        # The answer has the name in a header, whose value has no spaces at its ends.
        call: Call = request.state.call.named((body.request_id or "").strip())
        request.state.call = call
        options, prompts, news = body.options(), body.prompts, asyncio.Event()
        asked = [handler.generate(options, prompt, call, news, deadline_is_error=True) for prompt in prompts]
    return await unless_hung_up(request, _answer(handler, call, body, asked, form))


async def _answer(
    handler: RequestHandler, call: Call, body: GenerationBody, asked: Sequence[OpeningStream], form: type[Answers]
) -> Response:
    async with AsyncExitStack() as stack:
        streams = await _open_all(stack, asked, body)
        answers = form(call, body, [stream.request for stream in streams], handler)
        if not body.stream:
            whole = [pair async for pair in ordered_deltas_of(streams)]
            num_tokens = sum(len(delta.tokens) + len(delta.prompt_tokens) for _, delta in whole)
            return JsonResponse(await run_in_thread_if_long(num_tokens, lambda: answers.whole(whole)))
        deltas = deltas_of(streams)
        # Until there is an event, a status can tell an error.
        first = await anext(deltas)
        begin = b"".join((*answers.opening(first[1]), *answers.events(*first)))
        return EventStream(_events(call, answers, begin, deltas), stack.pop_all())


async def _open_all(
    stack: AsyncExitStack, asked: Sequence[OpeningStream], body: GenerationBody
) -> list[RequestStream]:
    """Open the stream of each prompt. All of the prompts run, or none does."""
    streams = []
    for place, opening in enumerate(asked):
        try:
            streams.append(await stack.enter_async_context(opening))
        except InvalidRequest as error:
            which = {} if len(asked) == 1 else dict.fromkeys(("prompt", "token_ids.ids"), f"prompt[{place}]")
            raise renamed(error, body.names | which) from None
    return streams


async def unless_hung_up(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """Return what `answer` returns. Raises ClientDisconnect when the caller hangs up."""

    async def hang_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering = asyncio.create_task(answer)
    hanging_up = asyncio.create_task(hang_up())
    try:
        await asyncio.wait((answering, hanging_up), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        return answering.result()
    finally:
        answering.cancel()
        hanging_up.cancel()


async def _events(
    call: Call, answers: Answers, begin: bytes, others: AsyncIterator[tuple[int, Delta]]
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream. An error is an event, too."""
    yield begin
    try:
        async for place, delta in others:
            # A delta whose text is held back makes no event.
            if new := b"".join(answers.events(place, delta)):
                yield new
        yield b"".join(answers.ending())
    except Exception as error:
        yield b"".join(answers.failing(call.refusal(error)))
