"""One connection to a server; one request, and when its tokens came.

Uses the generated stubs and not `ppserve.client`: a load generator must not try again or resume behind the back
of what it measures, and it shares the machine with the server, so every microsecond per token counts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Self

from grpc import aio

from ppserve.bench.workload import Question
from ppserve.client import CallFailed, Tls
from ppserve.client.connection import CHANNEL_OPTIONS, call_metadata
from ppserve.client.failures import failure_of
from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub

OK = "OK"
_ENDS = frozenset((pb.Finish.MAX_TOKENS, pb.Finish.CONTEXT_LENGTH))


@dataclass(frozen=True, slots=True)
class Answer:
    """How one request went. Times are seconds on this process's clock.

    intended_s: when it should have been sent, which is when its latency begins; sent_s: when it was.
    arrivals: for every message that brought tokens, (when, how many). status: OK or the name of a gRPC status.
    """

    question: Question
    intended_s: float
    sent_s: float
    ended_s: float
    arrivals: tuple[tuple[float, int], ...]
    status: str
    problem: str = ""

    @property
    def is_ok(self) -> bool:
        return self.status == OK

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def ttft_s(self) -> float:
        """Until the first token; of an answer that has one."""
        return self.arrivals[0][0] - self.intended_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None where there is but one."""
        later = self.num_tokens - self.arrivals[0][1]
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / later if later else None

    @property
    def itls_s(self) -> list[float]:
        """Gaps between messages, which are those between tokens unless the server merged some."""
        times = [at for at, _ in self.arrivals]
        return [after - before for before, after in pairwise(times)]


@dataclass(frozen=True, slots=True)
class Asking:
    """How requests are asked. timeout_s: the deadline of each, counted from when it is sent."""

    temperature: float = 0.0
    timeout_s: float | None = None


class Caller:
    """One HTTP/2 connection for all requests, as a client library would hold. For one event loop."""

    def __init__(
        self, target: str, *, api_key: str | None = None, tls: Tls | None = None, asking: Asking | None = None
    ) -> None:
        self._metadata = call_metadata(api_key)
        self._asking = asking or Asking()
        self._channel = (
            aio.insecure_channel(target, CHANNEL_OPTIONS)
            if tls is None
            else aio.secure_channel(target, tls.credentials(), CHANNEL_OPTIONS)
        )
        self._stub = GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def model_info(self) -> pb.GetModelInfoResponse:
        """Which model is served. Raises CallFailed."""
        try:
            answer = await self._stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=self._metadata)
        except aio.AioRpcError as error:
            raise failure_of(error) from None
        assert isinstance(answer, pb.GetModelInfoResponse)
        return answer

    async def topology(self) -> pb.GetTopologyResponse:
        """Where the stages' time went so far. Raises CallFailed."""
        try:
            answer = await self._stub.GetTopology(pb.GetTopologyRequest(), metadata=self._metadata)
        except aio.AioRpcError as error:
            raise failure_of(error) from None
        assert isinstance(answer, pb.GetTopologyResponse)
        return answer

    async def ask(self, question: Question, intended_s: float) -> Answer:
        """Send a request now, and wait for its end. Never raises for what a server can do."""
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=question.prompt_ids),
            sampling=pb.SamplingParams(temperature=self._asking.temperature, seed=question.number % 2**64),
            stop=pb.StopConditions(max_tokens=question.max_tokens, ignore_eos=True),
        )
        arrivals: list[tuple[float, int]] = []
        sent_s = time.perf_counter()
        status, problem = "INCOMPLETE", "the stream ended before its last message"
        call = self._stub.Generate(request, timeout=self._asking.timeout_s, metadata=self._metadata)
        try:
            while (message := await call.read()) is not aio.EOF:
                if message.num_tokens:
                    arrivals.append((time.perf_counter(), message.num_tokens))
                if message.HasField("finish"):
                    status, problem = _ending(message, sum(count for _, count in arrivals))
            ended_s = arrivals[-1][0] if arrivals else time.perf_counter()
        except aio.AioRpcError as error:
            failure: CallFailed = failure_of(error)
            status, problem, ended_s = failure.code, failure.problem, time.perf_counter()
        finally:
            call.cancel()
        return Answer(question, intended_s, sent_s, ended_s, tuple(arrivals), status, problem)

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _ending(message: pb.GenerateResponse, num_received: int) -> tuple[str, str]:
    """(status, problem) of an answer by its last message: what was asked for must have come, all of it."""
    if message.finish.reason not in _ENDS:
        return pb.Finish.Reason.Name(message.finish.reason), "ended before max_tokens"
    if message.usage.completion_tokens != num_received:
        return "INCOMPLETE", f"{num_received} tokens came, the server counts {message.usage.completion_tokens}"
    return OK, ""
