"""Requests for end-to-end tests: mixed in every way, sent together, answers as plain tuples."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc

from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub

WORDS = ["the", "quiet", "stage", "in", "front", "of", "every", "harbour", "held", "a", "lamp", "and", "two", "small", "boats", "while", "rain", "fell"]


@dataclass(frozen=True)
class Answer:
    """All that a request brought: its tokens, its text, and how it ended (a finish reason or a status)."""

    token_ids: tuple[int, ...]
    text: str
    end: str


def mixed_requests(count: int, seed: int, max_new: int = 48) -> list[pb.GenerateRequest]:
    """Requests of many lengths and ways of drawing; the same for the same seed."""
    rng = random.Random(seed)
    requests = []
    for number in range(count):
        request = pb.GenerateRequest(text=" ".join(rng.choices(WORDS, k=rng.choice([1, 3, 9, 30, 80, 150]))))
        request.output.token_ids = True
        request.stop.max_tokens = rng.randint(1, max_new)
        request.stop.ignore_eos = rng.random() < 0.5
        request.sampling.seed = number
        request.sampling.temperature = rng.choice([0.0, 0.7, 1.0, 1.4])
        if rng.random() < 0.4:
            request.sampling.top_k = rng.choice([1, 5, 50])
        if rng.random() < 0.4:
            request.sampling.top_p = rng.choice([0.3, 0.9])
        if rng.random() < 0.3:
            request.stop.stop.append(rng.choice(["the", ". ", "zzz"]))
        requests.append(request)
    return requests


def ask(target: str, requests: Sequence[pb.GenerateRequest], at_once: int, timeout_s: float = 100) -> list[Answer]:
    """The answers, in the order of the requests; `at_once` of them are under way together."""
    with grpc.insecure_channel(target) as channel, ThreadPoolExecutor(at_once) as pool:
        stub = GenerationServiceStub(channel)
        return list(pool.map(lambda request: ask_one(stub, request, timeout_s), requests))


def ask_one(stub: GenerationServiceStub, request: pb.GenerateRequest, timeout_s: float = 100) -> Answer:
    """One answer, its stream read to the end."""
    ids: list[int] = []
    count, text, end = 0, "", ""
    try:
        for message in stub.Generate(request, timeout=timeout_s):
            assert message.first_token == count, "a token was lost or came twice"
            count += message.num_tokens
            ids += [token.id for token in message.tokens]
            text += message.text
            if message.HasField("finish"):
                end = pb.Finish.Reason.Name(message.finish.reason)
    except grpc.RpcError as error:
        end = error.code().name
    return Answer(tuple(ids), text, end)
