"""The client for ordinary code. Safe to use from several threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ppserve.client.connection import TimeLimit, Tls, call_metadata, open_channel
from ppserve.client.conversation import Conversation, Retries, RetryPolicy
from ppserve.client.failures import failure_of
from ppserve.client.values import Chunk, Completion, Options, Prompt, Token, completion_of, request_of, tokens_of
from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub

R = TypeVar("R")


class Client:
    """One connection to a server. target: `host:port`. api_key: sent with every call."""

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._retry = retry or RetryPolicy()
        self._metadata = call_metadata(api_key)
        self._channel = open_channel(grpc.insecure_channel, grpc.secure_channel, target, tls)
        self._stub = GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer at once. Raises CallFailed."""
        return completion_of(list(self.stream(prompt, **options)))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[Chunk]:
        """The answer as it is generated. Closing the iterator cancels the request. Raises CallFailed."""
        limit = TimeLimit(options.get("timeout_s"))
        conversation = Conversation(request_of(prompt, options), self._retry)
        while (request := conversation.next_request()) is not None:
            call = self._stub.Generate(request, timeout=limit.left_s, metadata=self._metadata)
            try:
                for message in call:
                    yield conversation.take(message)
                conversation.check_end(request)
            except grpc.RpcError as error:
                time.sleep(limit.pause(conversation.pause_after(failure_of(error))))
            finally:
                call.cancel()

    def tokenize(self, text: str) -> tuple[Token, ...]:
        """The tokens that `generate` would see."""
        return tokens_of(self._call(self._stub.Tokenize, pb.TokenizeRequest(text=text)))

    def detokenize(self, ids: list[int]) -> str:
        """The text of tokens."""
        asked = pb.DetokenizeRequest(token_ids=pb.TokenIds(ids=ids))
        answer: pb.DetokenizeResponse = self._call(self._stub.Detokenize, asked)
        return answer.text

    def model_info(self) -> pb.GetModelInfoResponse:
        """Which model is served, and within which limits."""
        answer: pb.GetModelInfoResponse = self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest())
        return answer

    def topology(self) -> pb.GetTopologyResponse:
        """Which stage runs where, and where its time goes."""
        answer: pb.GetTopologyResponse = self._call(self._stub.GetTopology, pb.GetTopologyRequest())
        return answer

    def is_serving(self, service: str = "", timeout_s: float = 5.0) -> bool:
        """Whether the server answers that it serves. Raises CallFailed when there is no answer."""
        check = health_pb2_grpc.HealthStub(self._channel).Check
        try:
            answer = check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            raise failure_of(error) from None
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """Cancel what runs and close the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: Callable[..., R], request: object) -> R:
        """A unary call, tried again as the policy says."""
        retries = Retries(self._retry)
        while True:
            try:
                return method(request, metadata=self._metadata)
            except grpc.RpcError as error:
                time.sleep(retries.pause_after(failure_of(error)))
