"""The paths that generate: from a body to the request handler's streams, and from their deltas to the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import msgspec

from ppserve.errors import InvalidRequest
from ppserve.head.api.http.answers import Answers
from ppserve.head.api.http.exchange import Exchange
from ppserve.head.api.http.fields import CompletionBody, Sampling, called, check_model, completions_from
from ppserve.head.api.request_handler import RequestHandler, run_in_thread_if_long
from ppserve.head.api.requests import ParsedRequest
from ppserve.head.api.stream import RequestStream

_completion_body = msgspec.json.Decoder(CompletionBody)


async def completions(exchange: Exchange, request_handler: RequestHandler) -> None:
    """POST /v1/completions."""
    body = await exchange.read(_completion_body)
    check_model(body.model, request_handler.description.name)
    await generate(exchange, request_handler, body, completions_from(body), Answers)


async def generate(
    exchange: Exchange,
    request_handler: RequestHandler,
    body: Sampling,
    prompts: Sequence[ParsedRequest],
    kind: type[Answers],
) -> None:
    """Answers with what `prompts` bring: all of it, or as events. All of them run, or none."""
    # A header's value, as which the name goes back, has no spaces at its ends.
    exchange.call = request_handler.name(exchange.call, (body.request_id or "").strip())
    async with exchange.attended(), AsyncExitStack() as stack:
        streams: list[RequestStream] = []
        for place, parsed in enumerate(prompts):
            try:
                streams.append(
                    await stack.enter_async_context(request_handler.generate(parsed, exchange.call.another()))
                )
            except InvalidRequest as error:
                names = dict.fromkeys(("prompt", "token_ids.ids"), f"prompt[{place}]")
                raise (error if len(prompts) == 1 else called(names, error)) from None
        answers = kind(exchange.call, body, [stream.request for stream in streams], request_handler)
        if body.stream:
            await _send_events(exchange, answers, streams)
        else:
            deltas = [[delta async for delta in stream.deltas_in_time()] for stream in streams]
            num_tokens = sum(len(delta.tokens) + len(delta.prompt_scores) for part in deltas for delta in part)
            await exchange.answer(await run_in_thread_if_long(num_tokens, lambda: answers.whole(deltas)))


async def _send_events(exchange: Exchange, answers: Answers, streams: Sequence[RequestStream]) -> None:
    async def send(place: int, stream: RequestStream) -> None:
        async for delta in stream.deltas_in_time():
            await exchange.event(answers.event(place, delta))

    if len(streams) == 1:
        await send(0, streams[0])
    else:
        try:
            async with asyncio.TaskGroup() as group:
                for place, stream in enumerate(streams):
                    group.create_task(send(place, stream))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
    if (last := answers.last_event()) is not None:
        await exchange.event(last)
    await exchange.end_events()
