"""An engine without a model, behind the same seam as the real one, and a tokenizer of single bytes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
from grpc import aio
from msgspec.structs import replace

from ppserve import wire
from ppserve.answers import Timings
from ppserve.config import ServerSettings
from ppserve.core.architecture import Split, stage_layouts
from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.causes import BUSY, CAUSES
from ppserve.core.partition import PartCosts
from ppserve.core.plan import TokenLogprobs
from ppserve.core.request import FinishReason, Request
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.token_filter import TokenFilter
from ppserve.errors import InvalidRequest, RequestError, Violation
from ppserve.head.api.answer_parts.formats import FormatNames
from ppserve.head.api.auth import ApiKeys
from ppserve.head.api.chat_template import ChatTemplate
from ppserve.head.api.grpc.server import GrpcServer
from ppserve.head.api.request_handler import RequestHandler
from ppserve.head.api.tls import read_certificates
from ppserve.head.api.vllm_grpc.service import VllmService
from ppserve.head.descriptions import ModelDescription
from ppserve.head.engine.member import Decision, Member, StageState
from ppserve.head.engine.replica import ReplicaReading
from ppserve.head.engine.streams import OpenRequest, Sink, TokenOutput
from ppserve.tokenizer import ChatFormat, no_tokenizer
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.architectures import gpt2 as gpt2_architecture
from tests.hellos import hello
from tests.simulated_stage import mix

T = TypeVar("T")

KEYS = "# two people\n0123456789abcdef\n\nfedcba9876543210\n"
"""The lines of a file of keys."""
EOS = 256
CARD = ModelDescription(
    name="fake",
    root="fake",
    architecture=gpt2_architecture(
        2, 8, 2, 64, vocab_size=257, padded_vocab_size=320, inner_width=32, eos_ids=(EOS,)
    ),
    num_parameters=12345,
    dtype="float32",
    quantization="none",
    max_context=64,
    has_tokenizer=True,
    deterministic=True,
    nondeterministic_reason=None,
    version="0",
    chat_format=ChatFormat(tokens={"bos_token": "<eos>", "eos_token": "<eos>"}),
)
_HELLO = hello(0, 1, CARD.architecture)
_LOADED = wire.Loaded("cpu", 12345, 4, 1, 8, None)
_TIMES = (StageTimes(dict.fromkeys(BUSY, 1_000_000_000), dict.fromkeys(CAUSES, 500_000_000), 2_000_000_000),)
READING = ReplicaReading(
    replica=0,
    serves=True,
    epoch=1,
    microbatches=1,
    running=2,
    kv_usage=0.25,
    num_waiting=1,
    num_blocks=64,
    decision=Decision(
        *(stage_layouts(Split((4,))), "local", SchedulerConfig(1, max_num_seqs=8, max_model_len=64)),
        PartCosts(0.001, 0.001, 0.0, 0.0),
    ),
    times=_TIMES,
    steps=(0,),
    times_in_shape=_TIMES,
    steps_in_shape=(0,),
    ranks=((Member(0, 0, 0, StageState.READY, _HELLO, _LOADED),),),
    gathered_ns=((0,),),
    now_ns=0,
)


def answered(call: Callable[[], T]) -> Future[T]:
    """Answer as the engine does, but at once."""
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future


class ByteCodec:
    """Token i is byte i; end-of-text is 256."""

    special_ids: Mapping[str, int] = {"<eos>": EOS}

    def encode_parts(self, parts: Sequence[str], surrounds: bool = False) -> list[int]:
        texts = (self.special_ids[part] if place % 2 else part for place, part in enumerate(parts))
        return [token_id for part in texts for token_id in ([part] if isinstance(part, int) else part.encode())]

    def decode(self, ids: list[int], skips_special: bool = True) -> str:
        return b"".join(self.token_bytes(i) for i in ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return b"<eos>" if token_id == EOS else bytes([token_id])

    text_bytes = token_bytes

    def to_json(self) -> bytes:
        return b"{}"


def drawn_token(request: Request, index: int, offset: int) -> int:
    """A lower-case letter that depends on seed, index, prompt and offset, as a real draw does."""
    return ord("a") + mix(request.sampling.seed, index, offset, *request.prompt_ids) % 26


def generation(request: Request, index: int, said: bytes | None = None) -> list[TokenOutput]:
    """All outputs of one sequence; those of a resumed one are the rest of the same sequence. said: what it says,
    where its draws do not matter."""
    begin = len(request.resume_ids)
    scores: tuple[TokenLogprobs, ...] = ()
    if request.output.prompt_logprobs is not None and index == (request.resume_index or 0):
        scores = tuple(TokenLogprobs(-float(i)) for i in request.prompt_ids[1:])
    reason = request.length_end
    outputs = []
    length = request.stop.max_tokens if said is None else min(request.stop.max_tokens, len(said))
    if said is not None and length == len(said):
        reason = FinishReason.EOS
    for offset in range(begin, length):
        token_id = drawn_token(request, index, offset) if said is None else said[offset]
        top = tuple((token_id + i, -0.5 - i) for i in range(request.output.logprobs or 0))
        logprobs = None if request.output.logprobs is None else TokenLogprobs(-0.5, top)
        outputs.append(TokenOutput(index, offset, token_id, chr(token_id), logprobs))
    outputs = outputs or [TokenOutput(index, begin)]
    outputs[0] = replace(outputs[0], prompt_logprobs=scores)
    times = Timings(0.1, 0.2, 0.3, 0.4, (0.5, 0.6))
    outputs[-1] = replace(outputs[-1], finish=reason, cached_tokens=3, timings=times)
    return outputs


@dataclass
class FakeEngine:
    """Delivers every sequence's tokens, one step a loop turn, or what a test pushes by hand.

    by_hand: submitted requests wait for the test. refusal: raised by submit. break_after: streams end with this
    error after so many tokens of their own, this many times. halt_after: streams stand still there. said: what
    every answer says, in ASCII. snapshots_to_restart: a restart ends when its state was read so often.
    """

    description: ModelDescription = CARD
    by_hand: bool = False
    refusal: Exception | None = None
    break_error: RequestError | None = None
    break_after: int = 0
    num_breaks: int = 0
    halt_after: int | None = None
    said: bytes | None = None
    snapshots_to_restart: int = 0
    num_snapshots: int = 0
    requests: list[Request] = field(default_factory=list)
    filters: list[TokenFilter | None] = field(default_factory=list)
    refused: list[RequestError] = field(default_factory=list)
    sinks: dict[str, Sink] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _runs: set[asyncio.Task[None]] = field(default_factory=set)

    def reset(self) -> None:
        """Make it as new, for the next test."""
        self.refused.clear()
        vars(self).update(vars(FakeEngine(refused=self.refused, _runs=self._runs)))

    def submit(self, opened: OpenRequest) -> Future[None]:
        return answered(lambda: self.queue_request(opened.request, opened.sink, opened.token_filter))

    def queue_request(self, request: Request, sink: Sink, token_filter: TokenFilter | None = None) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        self.filters.append(token_filter)
        self.sinks[request.id] = sink
        self._news.set()
        if not self.by_hand:
            run = asyncio.create_task(self._run(request, sink))
            self._runs.add(run)
            run.add_done_callback(self._runs.discard)

    def cancel(self, request_id: str) -> None:
        self.cancelled.add(request_id)
        self._news.set()

    def restart(self, replica: int, pauses: bool) -> Future[int]:
        def begin() -> int:
            if replica:
                raise InvalidRequest([Violation("replica", f"there is no replica {replica}")])
            if not pauses:
                raise InvalidRequest([Violation("pauses", "no other replica serves")])
            return 1

        return answered(begin)

    def serves_after(self, replica: int, epoch: int) -> Future[bool]:
        return answered(lambda: self.num_snapshots >= self.snapshots_to_restart)

    def snapshot(self) -> tuple[ReplicaReading, ...]:
        self.num_snapshots += 1
        return (READING,)

    async def until(self, condition: Callable[[FakeEngine], bool], timeout_s: float = 10) -> None:
        """Wait for the engine to have been told something."""
        async with asyncio.timeout(timeout_s):
            while not condition(self):
                self._news.clear()
                await self._news.wait()

    async def _run(self, request: Request, sink: Sink) -> None:
        resumed = request.resume_index
        indices = range(request.num_sequences) if resumed is None else [resumed]
        sequences = [generation(request, index, self.said) for index in indices]
        breaks = self.num_breaks > 0
        self.num_breaks -= breaks
        for _ in range(3):
            await asyncio.sleep(0)  # the caller is told first that it is queued
        for step in range(max(map(len, sequences))):
            await asyncio.sleep(0)
            if step == self.halt_after:
                return
            if breaks and step == self.break_after:
                sink([TokenOutput(0, step, error=self.break_error)])
                return
            sink([outputs[step] for outputs in sequences if step < len(outputs)])


def handler_of(engine: FakeEngine, settings: ServerSettings | None = None) -> RequestHandler:
    tokenizer = ByteCodec() if engine.description.has_tokenizer else no_tokenizer()
    key_file = settings.api_key_file if settings else None
    keys = ApiKeys(key_file) if key_file else None
    chats = settings.chat_template if settings else None
    formats = FormatNames(settings.tool_format, settings.reasoning_format) if settings else FormatNames()
    tokens = CARD.chat_format.tokens
    template = ChatTemplate.read(chats, tokens, ByteCodec.special_ids, formats) if chats else None
    return RequestHandler(engine, engine.description, tokenizer, keys, engine.refused.append, template)


@asynccontextmanager
async def served(
    engine: FakeEngine, settings: ServerSettings | None = None
) -> AsyncIterator[tuple[GrpcServer, str]]:
    """A real server in this process on a free port: (door, target)."""
    settings = settings or ServerSettings(port=0)
    handler = handler_of(engine, settings)
    others = [VllmService(handler)] if settings.vllm_grpc else []
    door = GrpcServer(handler, others, read_certificates(settings))
    port = await door.start(settings.host, settings.port)
    handler.metrics_port = settings.metrics_port
    handler.set_serving(True)
    try:
        yield door, f"127.0.0.1:{port}"
    finally:
        await door.request_handler.drain(0)
        await door.stop()
        handler.close()


@contextmanager
def served_in_thread(engine: FakeEngine, serving: bool = True, **settings: object) -> Iterator[str]:
    """A server whose event loop runs in a thread of its own, for clients that block; yields its target."""
    ready, over = threading.Event(), asyncio.Event()
    found: list[str] = []
    loop = asyncio.new_event_loop()

    async def main() -> None:
        async with served(engine, ServerSettings(port=0, **settings)) as (door, target):
            door.request_handler.set_serving(serving)
            found.append(target)
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    try:
        assert ready.wait(10)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
        loop.close()


def channel_to(target: str) -> aio.Channel:
    """Connections of its own: others fail at first where a server that is gone had the port."""
    return aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])


@asynccontextmanager
async def stub_of(target: str) -> AsyncIterator[GenerationServiceStub]:
    async with channel_to(target) as channel:
        yield GenerationServiceStub(channel)


async def code_of(call: object) -> grpc.StatusCode:
    """The status that a call ends with."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK
