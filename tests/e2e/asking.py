"""Requests for end-to-end tests: mixed in every way, sent together, answers as plain tuples."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_float
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import grpc

from ppserve import Chunk, Pipeline
from ppserve.answers import Token
from ppserve.client.messages import read_chunk
from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests import as_gpu

WORDS = [
    *("the", "quiet", "stage", "in", "front", "of", "every", "harbour", "held", "a", "lamp"),
    *("and", "two", "small", "boats", "while", "rain", "fell"),
]

WITHIN_S = 1000
"""No server refuses a request because it could not be answered by then."""

Logprob = tuple[float, tuple[tuple[int, float], ...]]


@dataclass(frozen=True)
class Answer:
    """All that one sequence brought: tokens, text, log-probabilities, and how it ended (reason or status)."""

    token_ids: tuple[int, ...]
    text: str
    end: str
    matched: int | str | None
    logprobs: tuple[Logprob, ...]
    prompt_logprobs: tuple[Logprob, ...]
    prompt_ids: tuple[int, ...]


def requests_with_everything(count: int, seed: int) -> list[pb.GenerateRequest]:
    """Every parameter of the contract, mixed freely; the same for the same seed."""
    rng = random.Random(seed)

    def chance(share: float) -> bool:
        return rng.random() < share

    requests = []
    for number in range(count):
        request = pb.GenerateRequest(text=" ".join(rng.choices(WORDS, k=rng.choice([1, 3, 9, 30, 80, 150]))))
        sampling, stop, output = request.sampling, request.stop, request.output
        sampling.seed = number
        sampling.temperature = rng.choice([0.0, 0.7, 1.0, 1.4])
        for share, name, values in (
            (0.4, "top_k", [1, 5, 50]),
            (0.4, "top_p", [0.3, 0.9]),
            (0.3, "min_p", [0.02, 0.3]),
            (0.4, "repetition_penalty", [0.8, 1.3]),
            (0.4, "frequency_penalty", [-0.5, 0.7]),
            (0.4, "presence_penalty", [-0.5, 0.7]),
            (0.3, "n", [2, 3, 4]),
        ):
            if chance(share):
                setattr(sampling, name, rng.choice(values))
        for token_id in rng.sample(range(1280), 5 * chance(0.3)):
            sampling.logit_bias[token_id] = rng.uniform(-100, 8)
        sampling.allowed_token_ids.extend(sorted(rng.sample(range(1280), 400 * chance(0.15))))
        sampling.bad_words.extend(rng.sample(["the", " a", "e ", "on"], 2 * chance(0.2)))
        stop.max_tokens = rng.randint(1, 32)
        stop.ignore_eos = chance(0.5)
        stop.include_stop = chance(0.5)
        stop.stop.extend(rng.sample(["the", ". ", "zzz"], chance(0.3)))
        stop.stop_token_ids.extend(rng.sample(range(1280), 20 * chance(0.3)))
        if chance(0.3):
            stop.min_tokens = min(stop.max_tokens, rng.randint(1, 12))
        if chance(0.1):
            stop.max_tokens = stop.min_tokens = 0
        output.token_ids = True
        output.echo = chance(0.3)
        output.skip_special_tokens = chance(0.7)
        for share, name, values in (
            (0.5, "logprobs", [0, 3]),
            (0.2, "prompt_logprobs", [0, 2]),
            (0.2, "stream_interval", [2, 7]),
        ):
            if chance(share):
                setattr(output, name, rng.choice(values))
        requests.append(request)
    return requests


def options_of(request: pb.GenerateRequest) -> dict[str, Any]:
    """Its parameters by name, as `Pipeline` takes them."""
    parts = (request.sampling, request.stop, request.output)
    return {field.name: value for part in parts for field, value in part.ListFields()}


def ask(target: str, requests: Sequence[pb.GenerateRequest], at_once: int) -> list[Answer]:
    """The first sequence's answers, in the order of the requests; `at_once` of them are under way together."""
    return [answers[0] for answers in ask_all(target, requests, at_once)]


def ask_all(target: str, requests: Sequence[pb.GenerateRequest], at_once: int) -> list[tuple[Answer, ...]]:
    """The answers of all sequences of each request."""
    with grpc.insecure_channel(target) as channel, ThreadPoolExecutor(at_once) as pool:
        stub = GenerationServiceStub(channel)
        return list(pool.map(lambda request: ask_one(stub, request), requests))


def ask_one(stub: GenerationServiceStub, request: pb.GenerateRequest) -> tuple[Answer, ...]:
    """The answers of a request's `n` sequences, their stream read to the end."""
    heard: list[list[Chunk]] = [[] for _ in range(request.sampling.n or 1)]
    status = ""
    try:
        for message in stub.Generate(request, timeout=WITHIN_S):
            heard[message.index].append(read_chunk(message))
    except grpc.RpcError as error:
        status = error.code().name
    return tuple(_answer(chunks, status) for chunks in heard)


def answers_alone(requests: Sequence[pb.GenerateRequest]) -> list[tuple[Answer, ...]]:
    """Return what `Pipeline` answers to each request alone, on one stage: what a server must answer, whatever else
    it does."""
    with Pipeline("tiny", dtype="float32", threads=1, **as_gpu.settings()) as pipeline:
        return [_answers_of(pipeline, request) for request in requests]


def _answers_of(pipeline: Pipeline, request: pb.GenerateRequest) -> tuple[Answer, ...]:
    completion = pipeline.complete(request.text, **options_of(request))
    return tuple(_answer([sequence]) for sequence in completion.sequences)


def _answer(chunks: Sequence[Chunk], status: str = "") -> Answer:
    """What the chunks of one sequence say together. status: of a call that failed."""
    assert all(chunk.first_token == 0 for chunk in chunks[:1])
    for chunk, following in pairwise(chunks):
        assert following.first_token == chunk.first_token + chunk.num_tokens, "a token was lost or came twice"
        assert chunk.finish is None, "a chunk after the end"
    tokens = [token for chunk in chunks for token in chunk.tokens]
    prompt = [token for chunk in chunks for token in chunk.prompt_tokens]
    finish = chunks[-1].finish if chunks else None
    return Answer(
        token_ids=tuple(token.id for token in tokens),
        text="".join(chunk.text for chunk in chunks),
        end=status if finish is None else finish.reason,
        matched=None if finish is None else finish.matched,
        logprobs=tuple(map(_as_sent, tokens)),
        prompt_logprobs=tuple(map(_as_sent, prompt)),
        prompt_ids=tuple(token.id for token in prompt),
    )


def _as_sent(token: Token) -> Logprob:
    """A message holds log-probabilities as float32."""
    tops = tuple((top.id, c_float(top.logprob or 0.0).value) for top in token.top)
    return c_float(token.logprob or 0.0).value, tops


def await_tokens(stream: Iterator[pb.GenerateResponse]) -> None:
    """Reads until more than 20 tokens have come. They are counted, not the messages: a busy head sends several
    tokens in one."""
    heard = 0
    while heard <= 20:
        heard += next(stream).num_tokens
