"""Requests for end-to-end tests: mixed in every way, sent together, answers as plain tuples."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_float
from dataclasses import dataclass, field
from typing import Any

import grpc

from ppserve import Pipeline
from ppserve.answers import Token
from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests import as_gpu

WORDS = [
    *("the", "quiet", "stage", "in", "front", "of", "every", "harbour", "held", "a", "lamp"),
    *("and", "two", "small", "boats", "while", "rain", "fell"),
]


Logprob = tuple[float, tuple[tuple[int, float], ...]]


@dataclass(frozen=True)
class Answer:
    """All that one sequence brought: tokens, text, log-probabilities, and how it ended (reason or status)."""

    token_ids: tuple[int, ...]
    text: str
    end: str
    matched: int | str | None = None
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob, ...] = ()
    prompt_ids: tuple[int, ...] = ()


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


def requests_with_everything(count: int, seed: int) -> list[pb.GenerateRequest]:
    """Every parameter of the contract, mixed freely."""
    rng = random.Random(seed)
    requests = mixed_requests(count, seed, max_new=32)
    for request in requests:
        sampling, stop, output = request.sampling, request.stop, request.output
        if rng.random() < 0.3:
            sampling.min_p = rng.choice([0.02, 0.3])
        if rng.random() < 0.4:
            sampling.repetition_penalty = rng.choice([0.8, 1.3])
        if rng.random() < 0.4:
            sampling.frequency_penalty = rng.choice([-0.5, 0.7])
        if rng.random() < 0.4:
            sampling.presence_penalty = rng.choice([-0.5, 0.7])
        if rng.random() < 0.3:
            for _ in range(5):
                sampling.logit_bias[rng.randrange(1280)] = rng.uniform(-100, 8)
        if rng.random() < 0.3:
            sampling.n = rng.randint(2, 4)
        if rng.random() < 0.3:
            stop.stop_token_ids.extend(rng.sample(range(1280), 20))
        if rng.random() < 0.3:
            stop.min_tokens = min(stop.max_tokens, rng.randint(1, 12))
        stop.include_stop = rng.random() < 0.5
        output.echo = rng.random() < 0.3
        if rng.random() < 0.5:
            output.logprobs = rng.choice([0, 3])
        if rng.random() < 0.2:
            output.prompt_logprobs = rng.choice([0, 2])
        if rng.random() < 0.2:
            output.stream_interval = rng.choice([2, 7])
        if rng.random() < 0.1:
            stop.max_tokens = stop.min_tokens = 0
    return requests


# No server refuses a request because it could not be answered by then.
WITHIN_S = 1000


def ask(
    target: str, requests: Sequence[pb.GenerateRequest], at_once: int, timeout_s: float = WITHIN_S
) -> list[Answer]:
    """The first sequence's answers, in the order of the requests; `at_once` of them are under way together."""
    return [answers[0] for answers in ask_all(target, requests, at_once, timeout_s)]


def ask_all(
    target: str, requests: Sequence[pb.GenerateRequest], at_once: int, timeout_s: float = WITHIN_S
) -> list[tuple[Answer, ...]]:
    """The answers of all sequences of each request."""
    with grpc.insecure_channel(target) as channel, ThreadPoolExecutor(at_once) as pool:
        stub = GenerationServiceStub(channel)
        return list(pool.map(lambda request: ask_sequences(stub, request, timeout_s), requests))


def answers_alone(requests: Sequence[pb.GenerateRequest]) -> list[tuple[Answer, ...]]:
    """Of each request alone, on one stage, by `Pipeline`: what a server must answer, whatever else it does."""
    with Pipeline("tiny", dtype="float32", threads=1, **as_gpu.settings()) as pipeline:
        return [_answers_of(pipeline, request) for request in requests]


def _answers_of(pipeline: Pipeline, request: pb.GenerateRequest) -> tuple[Answer, ...]:
    parts = (request.sampling, request.stop, request.output)
    options: Any = {field.name: value for part in parts for field, value in part.ListFields()}
    answers = []
    for sequence in pipeline.complete(request.text, **options).sequences:
        ids = tuple(token.id for token in sequence.tokens)
        scores = tuple(map(_as_sent, sequence.tokens)), tuple(map(_as_sent, sequence.prompt_tokens))
        prompt_ids = tuple(token.id for token in sequence.prompt_tokens)
        end = sequence.finish
        answers.append(Answer(ids, sequence.text, end.reason, end.matched, *scores, prompt_ids))
    return tuple(answers)


def _as_sent(token: Token) -> Logprob:
    """A message holds log-probabilities as float32."""
    tops = tuple((top.id, c_float(top.logprob or 0.0).value) for top in token.top)
    return c_float(token.logprob or 0.0).value, tops


def await_tokens(stream: Iterator[pb.GenerateResponse], count: int = 20) -> None:
    """Reads until more than `count` tokens have come. They are counted, not the messages: a busy head sends
    several tokens in one."""
    heard = 0
    while heard <= count:
        heard += next(stream).num_tokens


def ask_one(stub: GenerationServiceStub, request: pb.GenerateRequest, timeout_s: float = 100) -> Answer:
    """One answer, its stream read to the end."""
    return ask_sequences(stub, request, timeout_s)[0]


def ask_sequences(
    stub: GenerationServiceStub, request: pb.GenerateRequest, timeout_s: float = WITHIN_S
) -> tuple[Answer, ...]:
    """The answers of a request's `n` sequences, their stream read to the end."""
    heard = [_Heard() for _ in range(request.sampling.n or 1)]
    try:
        for message in stub.Generate(request, timeout=timeout_s):
            heard[message.index].take(message)
    except grpc.RpcError as error:
        for each in heard:
            each.end = each.end or error.code().name
    return tuple(each.answer() for each in heard)


@dataclass
class _Heard:
    """What has come of one sequence."""

    count: int = 0
    ids: list[int] = field(default_factory=list)
    text: str = ""
    end: str = ""
    matched: int | str | None = None
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)

    def take(self, message: pb.GenerateResponse) -> None:
        assert message.first_token == self.count, "a token was lost or came twice"
        assert not self.end, "a message after the end"
        self.count += message.num_tokens
        self.ids += [token.id for token in message.tokens]
        self.text += message.text
        self.logprobs += [_logprob(token) for token in message.tokens]
        self.prompt_logprobs += [_logprob(token) for token in message.prompt_tokens]
        self.prompt_ids += [token.id for token in message.prompt_tokens]
        if message.HasField("finish"):
            self.end = pb.Finish.Reason.Name(message.finish.reason)
            which = message.finish.WhichOneof("matched")
            self.matched = getattr(message.finish, which) if which else None

    def answer(self) -> Answer:
        scores = tuple(self.logprobs), tuple(self.prompt_logprobs)
        return Answer(tuple(self.ids), self.text, self.end, self.matched, *scores, tuple(self.prompt_ids))


def _logprob(token: pb.TokenInfo) -> Logprob:
    return token.logprob, tuple((top.id, top.logprob) for top in token.top)
