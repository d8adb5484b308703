"""The service over a real gRPC server with an engine that has no model; and what its messages become."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from ppserve.answers import Timings
from ppserve.core.request import FinishReason
from ppserve.head.api.grpc.described import model_message, topology_message
from ppserve.head.api.grpc.messages import request_options, timings_message
from ppserve.head.descriptions import RankDescription, StageDescription, Topology
from ppserve.head.engine.replica import ReplicaReading
from ppserve.head.engine.streams import TokenOutput
from ppserve.head.limits import Limits
from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.fake_engine import CARD, EOS, READING, ByteCodec, FakeEngine, code_of, drawn_token
from tests.head.api.grpc.asking import ask
from tests.head.api.test_requests import REFUSED, fields_refused, made


async def test_tokens_text_finish_usage_and_seed(engine: FakeEngine, stub: GenerationServiceStub) -> None:
    parsed = ask(request_id="mine", sampling=pb.SamplingParams(seed=7), output=pb.OutputOptions(token_ids=True))
    messages = [message async for message in stub.Generate(parsed)]
    expected = [drawn_token(engine.requests[0], 0, offset) for offset in range(5)]
    assert [token.id for message in messages for token in message.tokens] == expected
    assert "".join(message.text for message in messages) == ByteCodec().decode(expected)
    offsets = [message.first_token for message in messages]
    assert offsets == sorted(offsets)
    assert sum(message.num_tokens for message in messages) == 5
    assert all(message.request_id == "mine" for message in messages)
    assert [message.HasField("finish") for message in messages][:-1] == [False] * (len(messages) - 1)
    last = messages[-1]
    assert last.finish.reason == pb.Finish.MAX_TOKENS
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (5, 5, 3)
    assert messages[0].seed == last.seed == 7
    assert not last.HasField("timings")
    others = [message.seed for _ in "ab" async for message in stub.Generate(ask(max_tokens=1))]
    assert len({*others, 0}) == 3


async def test_n_sequences_echo_logprobs_and_timings(engine: FakeEngine, stub: GenerationServiceStub) -> None:
    output = pb.OutputOptions(echo=True, logprobs=2, prompt_logprobs=0, timings=True)
    parsed = ask(sampling=pb.SamplingParams(n=3), output=output)
    messages = [message async for message in stub.Generate(parsed)]
    for index in range(3):
        mine = [message for message in messages if message.index == index]
        tokens = [drawn_token(engine.requests[0], index, offset) for offset in range(5)]
        assert "".join(message.text for message in mine) == "hello" + ByteCodec().decode(tokens)
        token = mine[0].tokens[0]
        assert (token.logprob, [top.logprob for top in token.top]) == (-0.5, [-0.5, -1.5])
        assert token.top[0].bytes == bytes([tokens[0]])
        assert list(mine[-1].timings.stage_busy_seconds) == [0.5, 0.6]
        assert mine[-1].HasField("finish")
    (scored,) = (message for message in messages if message.prompt_tokens)
    assert [token.bytes for token in scored.prompt_tokens] == [b"h", b"e", b"l", b"l", b"o"]
    assert not scored.prompt_tokens[0].HasField("logprob")
    assert [token.logprob for token in scored.prompt_tokens[1:]] == [-float(ord(c)) for c in "ello"]
    (alone,) = [m async for m in stub.Generate(ask(0, output=pb.OutputOptions(prompt_logprobs=1)))]
    assert (len(alone.prompt_tokens), alone.num_tokens, alone.usage.completion_tokens) == (5, 0, 0)
    assert alone.finish.reason == pb.Finish.MAX_TOKENS


async def test_what_ended_a_sequence_is_told_with_what_was_made(
    engine: FakeEngine, stub: GenerationServiceStub
) -> None:
    engine.by_hand = True
    call = stub.Generate(ask(sampling=pb.SamplingParams(n=3)))
    await engine.until(lambda engine: bool(engine.sinks))
    next(iter(engine.sinks.values()))(
        [
            TokenOutput(0, 0, 104, "h", finish=FinishReason.STOP_STRING, matched="stop!"),
            TokenOutput(1, 0, 256, "", finish=FinishReason.EOS, matched=256),
            TokenOutput(2, 0, 65, "A", finish=FinishReason.DEADLINE),
        ]
    )
    ends = {message.index: message async for message in call}
    finishes = [ends[index].finish for index in range(3)]
    assert (finishes[0].reason, finishes[0].stop) == (pb.Finish.STOP_STRING, "stop!")
    assert (finishes[1].reason, finishes[1].token_id) == (pb.Finish.EOS, 256)
    assert (ends[2].text, finishes[2].reason) == ("A", pb.Finish.DEADLINE)


async def test_cancelling_and_the_deadline_reach_the_engine(
    engine: FakeEngine, stub: GenerationServiceStub
) -> None:
    engine.by_hand = True
    call = stub.Generate(ask())
    await engine.until(lambda engine: bool(engine.requests))
    call.cancel()
    await engine.until(lambda engine: bool(engine.cancelled))
    assert await code_of(stub.Generate(ask(), timeout=0.3)) is grpc.StatusCode.DEADLINE_EXCEEDED
    await engine.until(lambda engine: len(engine.cancelled) == 2)
    assert [request.deadline_s is None for request in engine.requests] == [True, False]


async def test_inventing_keys_does_not_make_many_callers(engine: FakeEngine, stub: GenerationServiceStub) -> None:
    for key in ("one", "two", None):
        metadata = None if key is None else (("authorization", f"Bearer {key}"),)
        [message async for message in stub.Generate(ask(), metadata=metadata)]
    assert [request.caller for request in engine.requests] == ["ipv4:127.0.0.1"] * 3


async def test_id_and_traceparent_come_back_as_metadata(stub: GenerationServiceStub) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    call = stub.Generate(ask(request_id="mine"), metadata=(("traceparent", parent),))
    [message async for message in call]
    metadata = dict(await call.trailing_metadata())
    assert (metadata["x-request-id"], metadata["traceparent"]) == ("mine", parent)


async def test_tokenize_and_detokenize(stub: GenerationServiceStub) -> None:
    tokens = (await stub.Tokenize(pb.TokenizeRequest(text="é!"))).tokens
    assert [(token.id, token.bytes) for token in tokens] == [(0xC3, b"\xc3"), (0xA9, b"\xa9"), (33, b"!")]
    text = await stub.Detokenize(pb.DetokenizeRequest(token_ids=pb.TokenIds(ids=[0xC3, 0xA9, 0xC3])))
    assert (text.text, text.bytes) == ("é\ufffd", b"\xc3\xa9\xc3")
    bad = pb.DetokenizeRequest(token_ids=pb.TokenIds(ids=[5000]))
    assert await code_of(stub.Detokenize(bad)) is grpc.StatusCode.INVALID_ARGUMENT
    long = "x" * 20_000
    assert len((await stub.Tokenize(pb.TokenizeRequest(text=long))).tokens) == 20_000


async def test_model_and_topology(stub: GenerationServiceStub) -> None:
    model = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.model, model.max_context, model.eos_token_id, model.limits.max_n) == ("fake", 64, 256, 128)
    assert (model.architecture.num_parameters, model.architecture.family) == (12345, "gpt2")
    assert list(model.eos_token_ids) == [EOS]
    stage = (await stub.GetTopology(pb.GetTopologyRequest())).stages[0]
    assert (stage.device, stage.num_layers, stage.bubble_seconds["host"]) == ("cpu", 2, 0.5)
    assert stage.HasField("predicted_step_seconds")
    assert not stage.HasField("measured_step_seconds")


PARTS = {"sampling": pb.SamplingParams, "stop": pb.StopConditions, "output": pb.OutputOptions}
FIELDS = [(home, field.name) for home, part in PARTS.items() for field in part.DESCRIPTOR.fields]
COMPOSITE = {
    "logit_bias": {5: 1.0}, "stop": ["x"], "stop_token_ids": [3], "allowed_token_ids": [3], "bad_words": ["x"],
}  # fmt: skip
BY_TYPE = {bool: True, int: 3, float: 0.5}


@pytest.mark.parametrize(("home", "field"), FIELDS)
def test_every_field_arrives_under_its_name_and_reaches_the_core(home: str, field: str) -> None:
    part = PARTS[home]
    value = COMPOSITE.get(field) or BY_TYPE[type(getattr(part(), field))]
    given, _ = request_options(pb.GenerateRequest(**{home: part(**{field: value})}))
    assert given.said() == {"priority": 0, field: value}
    assert made(**given.said()) != made()


RANK = RankDescription(1, 1, "there", "cuda:1", 7, gather_s=0.5, live=True, restarts=2)
STAGE = StageDescription(
    stage=1, rank=2, host="there", device="cuda:1", first_layer=3, num_layers=4, layers="3-6", num_parameters=5,
    weight_bytes=6, kv_bytes=7, predicted_step_s=0.1, measured_step_s=0.2, busy_s=0.3, bubble_s={"host": 0.4},
    idle_s=0.5, live=True, restarts=8, replica=9, steps=10, ranks=(RANK,),
)  # fmt: skip
REPLICA = replace(READING, replica=3)
TOPOLOGY = Topology((STAGE,), "local", epoch=1, microbatches=2, advice="less", replicas=(REPLICA,))
DESCRIPTION = replace(
    CARD, deterministic=True, nondeterministic_reason="why", kernels="own", limits=replace(CARD.limits, max_n=3)
)
TIMES = Timings(0.1, 0.2, 0.3, 0.4, (0.5, 0.6))


def stage_message(stage: StageDescription) -> pb.Stage:
    return topology_message(replace(TOPOLOGY, stages=(stage,))).stages[0]


def replica_message(reading: ReplicaReading) -> pb.Replica:
    return topology_message(replace(TOPOLOGY, replicas=(reading,))).replicas[0]


def limits_message(limits: Limits) -> pb.Limits:
    return model_message(replace(DESCRIPTION, limits=limits)).limits


COMPLETE: list[tuple[Callable[[Any], Message], Any]] = [
    (lambda topology: topology_message(topology, metrics_port=9400), TOPOLOGY),
    (stage_message, STAGE),
    (lambda rank: stage_message(replace(STAGE, ranks=(rank,))).ranks[0], RANK),
    (limits_message, DESCRIPTION.limits),
    (timings_message, TIMES),
]
PARTIAL: list[tuple[Callable[[Any], Message], Any]] = [
    (replica_message, REPLICA),
    (model_message, DESCRIPTION),
    (lambda arch: model_message(replace(DESCRIPTION, architecture=arch)).architecture, DESCRIPTION.architecture),
]
# The first of a stage's ranks is 0.
ALWAYS_ZERO = {"ppserve.v1.Stage.tensor"}


@pytest.mark.parametrize(("make", "record"), [*COMPLETE, *PARTIAL], ids=lambda value: type(value).__name__)
def test_a_description_fills_every_field_of_its_message(make: Callable[[Any], Message], record: Any) -> None:
    message = make(record)
    filled = {field.full_name for field, _ in message.ListFields()}
    assert {field.full_name for field in message.DESCRIPTOR.fields} - filled <= ALWAYS_ZERO


OTHER: dict[type, Any] = {str: "else", bool: False, int: 77, float: 0.875, dict: {"host": 0.9}}


@pytest.mark.parametrize(("make", "record"), COMPLETE, ids=lambda value: type(value).__name__)
def test_nothing_that_is_described_is_left_out(make: Callable[[Any], Message], record: Any) -> None:
    """Each field of the record, changed, changes the message."""
    silent = set()
    for field in fields(record):
        value = getattr(record, field.name)
        other = () if isinstance(value, tuple) else OTHER[type(value)]
        if make(replace(record, **{field.name: other})) == make(record):
            silent.add(field.name)
    assert silent <= {"steps"}, "of these only the library tells"


def test_prompt_priority_and_resume() -> None:
    message = pb.GenerateRequest(text="hello", priority=-3, resume=pb.ResumeFrom(generated_token_ids=[4, 5]))
    given, prompt = request_options(message)
    said = {**given.said(), "resume_ids": list(given.resume_ids or ())}
    assert (said, prompt) == ({"priority": -3, "resume_index": 0, "resume_ids": [4, 5]}, "hello")
    older = pb.GenerateRequest.FromString(bytes([8 << 3, 7]))  # what callers with older stubs call a priority of 7
    assert (older.urgency, request_options(older)[0].said()) == (7, {"priority": -7})
    assert request_options(pb.GenerateRequest(priority=-2, urgency=3))[0].said() == {"priority": -5}
    for empty in (pb.GenerateRequest(), pb.GenerateRequest(text="")):
        given, prompt = request_options(empty)
        assert (given.said(), len(prompt)) == ({"priority": 0}, 0)
    assert list(request_options(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2])))[1]) == [1, 2]


def test_zero_is_not_the_default() -> None:
    sampling, stop = pb.SamplingParams(temperature=0, seed=0, n=0), pb.StopConditions(max_tokens=0)
    output = pb.OutputOptions(logprobs=0)
    given, _ = request_options(pb.GenerateRequest(sampling=sampling, stop=stop, output=output))
    assert given.said() == {"priority": 0, "temperature": 0.0, "seed": 0, "n": 0, "max_tokens": 0, "logprobs": 0}


@pytest.mark.parametrize(("given", "_named"), REFUSED)
def test_errors_name_fields_of_the_message(given: dict[str, object], _named: str) -> None:
    refused = fields_refused(**given)
    assert refused
    for field in refused:
        descriptor = pb.GenerateRequest.DESCRIPTOR
        for name in field.partition("[")[0].split("."):
            found = descriptor.fields_by_name.get(name) or descriptor.oneofs_by_name.get(name)
            assert found is not None, f"the message has no field {field}"
            descriptor = getattr(found, "message_type", None)
