"""Serves a call in the same way for every protocol: tokenizes it, checks it, submits it, streams its answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from ppserve.core.scheduling.token_filter import TokenFilter
from ppserve.errors import Draining, InvalidRequest, RequestError, Violation
from ppserve.head.api.answer_parts.answer_format import AnswerPlan
from ppserve.head.api.asked_chat import AskedChat
from ppserve.head.api.auth import ApiKeys
from ppserve.head.api.call import Call
from ppserve.head.api.chat_template import ChatTemplate
from ppserve.head.api.forms import Forms
from ppserve.head.api.requests import Prompt, check_ids, echo, encode, to_request
from ppserve.head.api.stream import RequestStream
from ppserve.head.descriptions import ModelDescription, Topology, describe_topology
from ppserve.head.engine.loop import Engine
from ppserve.head.engine.replica import ReplicaReading
from ppserve.head.engine.streams import OpenRequest
from ppserve.head.options import GenerationOptions
from ppserve.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# To tokenize so many characters, or detokenize so many tokens, would hold up the event loop for milliseconds.
LONG_TEXT = 4096

# How often a restarted replica is asked whether it serves.
_RESTART_CHECK_S = 0.1

# Detokenizing a resumed answer's token takes as long as tokenizing so many characters.
_HELD_COSTS = 16

NOT_SERVING = "not serving: a stage is away, or the server is shutting down"

T = TypeVar("T")


class RequestHandler:
    """The engine as all protocols call it, in the event loop.

    keys: None if no call needs a key. count_refusal: is called with errors that end a request before it is queued.
    template: None if no chats can be served.
    """

    def __init__(
        self,
        engine: Engine,
        description: ModelDescription,
        tokenizer: Tokenizer,
        keys: ApiKeys | None = None,
        count_refusal: Callable[[RequestError], None] = lambda error: None,
        template: ChatTemplate | None = None,
    ) -> None:
        self._engine = engine
        self.description = description
        self.tokenizer = tokenizer
        self.keys = keys
        self.template = template
        self._forms = Forms(tokenizer, description)
        self._count_refusal = count_refusal
        self._streams: dict[RequestStream, Call] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self.is_serving = False  # what health checks are told
        self.metrics_port = 0  # of this server; 0 = none
        self.serving_changed = asyncio.Event()
        """It is set at the next change of `is_serving`, and then replaced."""

    # ---- generating ----

    @contextmanager
    def counting_refusals(self, generates: bool = True) -> Iterator[None]:
        """Count an error in the block as a request's end, if the call generates."""
        try:
            yield
        except RequestError as error:
            if generates:
                self._count_refusal(error)
            raise

    @asynccontextmanager
    async def generate(
        self,
        given: GenerationOptions,
        prompt: Prompt | AskedChat,
        call: Call,
        news: asyncio.Event | None = None,
        deadline_is_error: bool = False,
    ) -> AsyncIterator[RequestStream]:
        """Open a new request's stream, to be read in the block. Leaving the block early ends the request.

        The answers to a chat are told in their parts, too. news, deadline_is_error: see `RequestStream`.
        Raises RequestError if the request is refused.
        """
        with self.counting_refusals():
            plan = None
            if isinstance(prompt, AskedChat):
                prompt, plan = await self.chat_prompt(prompt, call.caller)
                given = plan.adjusted(given)
            surrounds = given.add_special_tokens is not False
            prompt_ids = (
                await self.tokenize("prompt", prompt, surrounds=surrounds) if isinstance(prompt, str) else prompt
            )
            request = to_request(given, prompt_ids, self.description, call)
            echoed = echo(prompt, request, self.tokenizer)
            token_filter = await self._forms.filter_of(given, request.resume_ids, call)
            if self._draining:
                raise Draining("the server is shutting down")
        stream = RequestStream(request, echoed, news, deadline_is_error, plan)
        self._streams[stream] = call
        self._idle.clear()
        try:
            await self._submit(stream, token_filter)
            yield stream
        finally:
            self._close(stream)
        end = "answered" if stream.is_complete else "cancelled"
        log.info("request %s: %s", call.request_id, end, extra=call.trace | {"caller": call.caller})

    async def _submit(self, stream: RequestStream, token_filter: TokenFilter | None) -> None:
        request, eos_ids = stream.request, self.description.architecture.eos_ids
        length = _HELD_COSTS * len(request.resume_ids)
        with self.counting_refusals():
            opened = await run_in_thread_if_long(
                length, lambda: OpenRequest(request, stream.push, self.tokenizer, eos_ids, token_filter)
            )
            stream.held_text = opened.held_text
            await asyncio.wrap_future(self._engine.submit(opened))

    def _close(self, stream: RequestStream) -> None:
        del self._streams[stream]
        if not self._streams:
            self._idle.set()
        if not stream.is_complete:
            self._engine.cancel(stream.request.id)

    def abort(self, request_ids: Collection[str], caller: str) -> None:
        """End `caller`'s open requests of these names. Names are no secret, so other callers' requests stay."""
        for stream, call in self._streams.items():
            if call.request_id in request_ids and call.caller == caller:
                self._engine.cancel(stream.request.id)

    async def restart(self, replica: int, pauses: bool) -> None:
        """Restart a replica, and return when it serves again. pauses: whether to do so even if no other replica
        serves meanwhile. Raises RequestError."""
        epoch = await asyncio.wrap_future(self._engine.restart(replica, pauses))
        while not await asyncio.wrap_future(self._engine.serves_after(replica, epoch)):
            await asyncio.sleep(_RESTART_CHECK_S)

    async def topology(self) -> Topology:
        """Return what runs where, and where its time went."""
        return await asyncio.to_thread(lambda: describe_topology(self._engine.snapshot()))

    async def snapshot(self) -> tuple[ReplicaReading, ...]:
        """Return the state of every replica."""
        return await asyncio.to_thread(self._engine.snapshot)

    @property
    def num_open_streams(self) -> int:
        return len(self._streams)

    def set_serving(self, serving: bool) -> None:
        """Note whether the stages of at least one replica answer."""
        self.is_serving = serving and not self._draining
        self.serving_changed.set()
        self.serving_changed = asyncio.Event()

    async def drain(self, timeout_s: float, *at_once: asyncio.Future[Any]) -> None:
        """Refuse new requests. Those that still run after `timeout_s`, or at `at_once`, end with UNAVAILABLE."""
        self._draining = True
        self.set_serving(False)
        idle = asyncio.ensure_future(self._idle.wait())
        await asyncio.wait((idle, *at_once), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        if self._streams:
            log.warning("ended %d streams that were still running", len(self._streams))
        for stream in self._streams:
            stream.fail(Draining("the server shut down before this request was through"))

    def close(self) -> None:
        """End the processes that work for requests. Call it when no request is open any more."""
        self._forms.close()
        if self.template is not None:
            self.template.close()

    # ---- text and tokens ----

    async def tokenize(self, field: str, *texts: str, surrounds: bool = True) -> list[int]:
        """Call `encode`, in a worker thread for long texts."""
        return await run_in_thread_if_long(
            sum(map(len, texts)), lambda: encode(field, texts, self.tokenizer, self.description, surrounds)
        )

    async def chat_prompt(self, chat: AskedChat, caller: str) -> tuple[list[int], AnswerPlan]:
        """Return the tokens of what the chat template makes of a chat, and how its answers are made and read.
        Raises InvalidRequest."""
        parts, plan = await chat.render(self.template, caller)
        return await self.tokenize(chat.place, *parts, surrounds=chat.surrounds), plan

    async def detokenize(self, field: str, ids: Sequence[int]) -> tuple[str, bytes]:
        """Return the text and the exact bytes of `ids`. Raises InvalidRequest for `field`."""
        check_ids(field, ids, self.description)
        tokenizer = self.tokenizer
        return await run_in_thread_if_long(
            len(ids), lambda: (tokenizer.decode(ids), b"".join(map(tokenizer.token_bytes, ids)))
        )

    def tokenizer_config(self) -> dict[str, Any]:
        """Return what Hugging Face's `tokenizer_config.json` holds. Raises InvalidRequest without a tokenizer."""
        description, template = self.description, self.template
        if not description.has_tokenizer:
            raise InvalidRequest([Violation("", "this model has no tokenizer: send token ids")])
        tokens = description.chat_format.tokens
        return {
            "bos_token": None,
            "eos_token": None,
            "pad_token": tokens.get("eos_token"),
            **tokens,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": description.max_context,
            "chat_template": None if template is None else template.source,
        }


async def run_in_thread_if_long(length: int, work: Callable[[], T]) -> T:
    """Return what `work` returns. It runs in a thread if other streams would wait too long for it."""
    return work() if length < LONG_TEXT else await asyncio.to_thread(work)
