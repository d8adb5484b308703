"""The paths that generate: from a body to the request handler's streams, and from their deltas to the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack

from starlette.requests import Request
from starlette.responses import Response

from ppserve.errors import InvalidRequest
from ppserve.head.api.call import Call
from ppserve.head.api.http.answers import Answers
from ppserve.head.api.http.calls import EventStream, JsonResponse, ended_by_hang_up, read_body
from ppserve.head.api.http.failures import HTTP_NAMES, content_of
from ppserve.head.api.http.fields import (
    COMPLETION,
    Body,
    Prompt,
    check_common,
    completion_fields,
    completion_prompts,
)
from ppserve.head.api.request_handler import RequestHandler, run_in_thread_if_long
from ppserve.head.api.requests import Fields, renamed
from ppserve.head.api.stream import AT_THE_END, RequestStream, deltas_in_time


async def completions(request: Request, handler: RequestHandler) -> Response:
    """POST /v1/completions."""
    with handler.counting_refusals():
        body = await read_body(request, COMPLETION)
        check_common(body, handler.description.name)
        given, prompts = completion_fields(body), completion_prompts(body)
    return await generate(request, handler, body, given, prompts, Answers)


async def generate(
    request: Request,
    handler: RequestHandler,
    body: Body,
    given: Fields,
    prompts: Sequence[Prompt],
    kind: type[Answers],
    names: Mapping[str, str] = HTTP_NAMES,
) -> Response:
    """Answers with what `prompts` bring: all of it, or as events. All of them run, or none. names: what the body
    calls a request's fields, where the proto's names do not tell."""
    # A header's value, as which the name goes back, has no spaces at its ends.
    name, max_bytes = body.get("request_id", "").strip(), handler.description.limits.max_request_id_bytes
    with handler.counting_refusals():
        call: Call = request.state.call.named(name, max_bytes)
    request.state.call = call
    if not body.get("stream"):
        given = {**given, "stream_interval": AT_THE_END}
    async with ended_by_hang_up(request), AsyncExitStack() as stack:
        news, streams = asyncio.Event(), []
        for place, prompt in enumerate(prompts):
            stream = handler.generate(given, prompt, call.another(), news)
            try:
                streams.append(await stack.enter_async_context(stream))
            except InvalidRequest as error:
                which = {} if len(prompts) == 1 else dict.fromkeys(("prompt", "token_ids.ids"), f"prompt[{place}]")
                raise renamed(error, {**names, **which}) from None
        answers = kind(call, body, [stream.request for stream in streams], handler)
        if not body.get("stream"):
            deltas = [pair async for pair in deltas_in_time(streams)]
            num_tokens = sum(len(delta.tokens) + len(delta.prompt_scores) for _, delta in deltas)
            return JsonResponse(await run_in_thread_if_long(num_tokens, lambda: answers.whole(deltas)))
        events = _events(answers, streams)
        first = await anext(events)  # until then, an error can be told by a status
        return EventStream(_answered(call, first, events), stack.pop_all())


async def _events(answers: Answers, streams: Sequence[RequestStream]) -> AsyncIterator[bytes]:
    async for place, delta in deltas_in_time(streams):
        yield _event(answers.event(place, delta))
    if (last := answers.last_event()) is not None:
        yield _event(last)


async def _answered(call: Call, first: bytes, others: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The events of an answer that has begun: an error is told by an event now."""
    yield first
    try:
        async for event in others:
            yield event
    except Exception as error:
        yield _event(content_of(call.refusal(error)))
    yield _event(b"[DONE]")


def _event(content: bytes) -> bytes:
    return b"data: %b\n\n" % content
