"""The way of every path that generates: a body's prompts become streams, and their deltas become the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ppserve.errors import InvalidRequest
from ppserve.head.api.answer_parts.answer_format import AnswerPlan
from ppserve.head.api.call import Call
from ppserve.head.api.http.answers import Answers
from ppserve.head.api.http.asked import Asked
from ppserve.head.api.http.bodies import GenerationBody, read_body
from ppserve.head.api.http.responses import EventStream, JsonResponse
from ppserve.head.api.request_handler import RequestHandler, run_in_thread_if_long
from ppserve.head.api.requests import renamed
from ppserve.head.api.stream import Delta, RequestStream, deltas_of, ordered_deltas_of
from ppserve.head.options import GenerationOptions


async def generate(
    request: Request, handler: RequestHandler, kind: type[GenerationBody], form: type[Answers]
) -> Response:
    """Answer a body's prompts, whole or as events."""
    with handler.counting_refusals():
        body = await read_body(request, kind, handler)
        # The answer has the name in a header, whose value has no spaces at its ends.
        call: Call = request.state.call.named((body.request_id or "").strip())
        request.state.call = call
        asked = await ask(body, handler, call.caller)
    return await unless_hung_up(request, _answer(handler, call, body, asked, form))


async def ask(body: GenerationBody, handler: RequestHandler, caller: str) -> Asked:
    """Return what a body asks to be generated. Raises RequestError, with the body's names of fields."""
    try:
        options, chat = body.options(), body.conversation
        if chat is None:
            return Asked(body.prompts(), options)
        prompt, plan = await handler.chat_prompt(chat, caller)
        return Asked([prompt], planned(options, plan), plan)
    except InvalidRequest as error:
        raise renamed(error, body.names) from None


def planned(options: GenerationOptions, plan: AnswerPlan) -> GenerationOptions:
    """Return the options with what a plan needs."""
    if plan.shows_special:
        options = replace(options, skip_special_tokens=False)
    return options if plan.form is None else replace(options, structured_output=plan.form)


async def _answer(
    handler: RequestHandler, call: Call, body: GenerationBody, asked: Asked, form: type[Answers]
) -> Response:
    async with AsyncExitStack() as stack:
        streams = await _open_streams(stack, handler, call, body, asked)
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


async def _open_streams(
    stack: AsyncExitStack, handler: RequestHandler, call: Call, body: GenerationBody, asked: Asked
) -> list[RequestStream]:
    """Open a stream for each prompt. All of the prompts run, or none does."""
    news, streams = asyncio.Event(), []
    for place, prompt in enumerate(asked.prompts):
        stream = handler.generate(asked.options, prompt, call, news, deadline_is_error=True, plan=asked.plan)
        try:
            streams.append(await stack.enter_async_context(stream))
        except InvalidRequest as error:
            which = (
                {} if len(asked.prompts) == 1 else dict.fromkeys(("prompt", "token_ids.ids"), f"prompt[{place}]")
            )
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
