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
    """The result of one request. Times are seconds on this process's clock."""

    question: Question
    intended_s: float
    """The time at which it was due, from which its latency counts."""
    ended_s: float
    arrivals: tuple[tuple[float, int], ...]
    """The time at which each message with tokens arrived, and how many tokens it had."""
    status: str
    """OK, the name of a gRPC status, or what the answer lacked."""
    problem: str = ""

    @property
    def is_ok(self) -> bool:
        return self.status == OK

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def ttft_s(self) -> float:
        """Time from when the request was due to its first token. The answer must have tokens."""
        return self.arrivals[0][0] - self.intended_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first message; None if there are no such tokens."""
        later = self.num_tokens - self.arrivals[0][1]
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / later if later else None

    @property
    def itls_s(self) -> list[float]:
        """Times between messages, which are those between tokens unless the server merged some."""
        times = [at for at, _ in self.arrivals]
        return [after - before for before, after in pairwise(times)]


class Caller(AsyncClient):
    """One HTTP/2 connection for all requests, as client libraries use. It is for one event loop and never retries.

    timeout_s: the deadline of every request, from when it is sent.
    """

    def __init__(self, target: str, timeout_s: float | None = None, **connection: Any) -> None:
        super().__init__(target, retry=RetryPolicy(max_attempts=1, resume=False), **connection)
        self._timeout_s = timeout_s

    async def send_question(self, question: Question, intended_s: float) -> Answer:
        """Send a request and wait for its end. A failure is in the answer and is not raised."""
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
    """Return the status and the problem by the last message. The status is OK only if every token arrived."""
    if message.finish.reason not in _ENDS:
        return pb.Finish.Reason.Name(message.finish.reason), "ended before max_tokens"
    if message.usage.completion_tokens != num_received:
        return "INCOMPLETE", f"{num_received} tokens arrived, the server counts {message.usage.completion_tokens}"
    return OK, ""
