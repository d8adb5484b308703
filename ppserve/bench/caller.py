"""One connection to a server; one request, and when its tokens arrived.

Requests go through the generated stub and not the client's `stream`: a load generator must not retry or resume
unseen, and every microsecond per token counts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from grpc import aio

from ppserve.client import AsyncClient, CallFailed, RetryPolicy
from ppserve.client.connection import TimeLimit
from ppserve.client.messages import read_failure
from ppserve.v1 import generation_pb2 as pb

OK = "OK"
_ENDS = frozenset((pb.Finish.MAX_TOKENS, pb.Finish.CONTEXT_LENGTH))


@dataclass(frozen=True, slots=True)
class Question:
    """One request."""

    number: int
    prompt_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """How one request went. Times are seconds on this process's clock."""

    question: Question
    intended_s: float
    """When it was due, from which its latency counts."""
    ended_s: float
    arrivals: tuple[tuple[float, int], ...]
    """For every message with tokens: when it came, with how many."""
    status: str
    """OK, the name of a gRPC status, or how the answer fell short."""
    problem: str = ""

    @property
    def is_ok(self) -> bool:
        return self.status == OK

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def ttft_s(self) -> float:
        """Time from when it was due to its first token; asked for only with tokens."""
        return self.arrivals[0][0] - self.intended_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first message; None without any."""
        later = self.num_tokens - self.arrivals[0][1]
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / later if later else None

    @property
    def itls_s(self) -> list[float]:
        """Gaps between messages: between tokens, unless the server merged several."""
        times = [at for at, _ in self.arrivals]
        return [after - before for before, after in pairwise(times)]


class Caller(AsyncClient):
    """One HTTP/2 connection for all requests, as a client library has. For one event loop. Never retries.

    timeout_s: of every request, from when it is sent.
    """

    def __init__(self, target: str, timeout_s: float | None = None, **connection: Any) -> None:
        super().__init__(target, retry=RetryPolicy(max_attempts=1, resume=False), **connection)
        self._timeout_s = timeout_s

    async def send_question(self, question: Question, intended_s: float) -> Answer:
        """Sends a request and waits for its end. Failures are in the answer."""
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=question.prompt_ids),
            sampling=pb.SamplingParams(temperature=0.0, seed=question.number % 2**64),
            stop=pb.StopConditions(max_tokens=question.max_tokens, ignore_eos=True),
        )
        arrivals: list[tuple[float, int]] = []
        status = "INCOMPLETE"
        problem = "the stream ended before its last message"
        call = self._stub.Generate(request, timeout=TimeLimit(self._timeout_s).left_s, metadata=self._metadata)
        try:
            while (message := await call.read()) is not aio.EOF:
                if message.num_tokens:
                    arrivals.append((time.perf_counter(), message.num_tokens))
                if message.HasField("finish"):
                    status, problem = _ending(message, sum(count for _, count in arrivals))
            ended_s = arrivals[-1][0] if arrivals else time.perf_counter()
        except aio.AioRpcError as error:
            failure: CallFailed = read_failure(error)
            status = failure.code
            problem = failure.problem
            ended_s = time.perf_counter()
        finally:
            call.cancel()
        return Answer(question, intended_s, ended_s, tuple(arrivals), status, problem)


def _ending(message: pb.GenerateResponse, num_received: int) -> tuple[str, str]:
    """(status, problem) by the last message: OK only with every token."""
    if message.finish.reason not in _ENDS:
        return pb.Finish.Reason.Name(message.finish.reason), "ended before max_tokens"
    if message.usage.completion_tokens != num_received:
        return "INCOMPLETE", f"{num_received} tokens came, the server counts {message.usage.completion_tokens}"
    return OK, ""
