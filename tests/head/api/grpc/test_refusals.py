"""What the service refuses, and what callers are told of errors."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest

from ppserve.errors import Overloaded
from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.fake_engine import CARD, FakeEngine, channel_to, code_of, served, stub_of
from tests.head.api.grpc.asking import ask, details, failure_of

GENERATE = "/ppserve.v1.GenerationService/Generate"


async def test_refusal_names_every_field(engine: FakeEngine, stub: GenerationServiceStub) -> None:
    wrong = ask(sampling=pb.SamplingParams(top_p=7, n=129))
    failure = await failure_of(stub.Generate(wrong))
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    reason, bad = details(failure)
    assert (reason.reason, reason.domain) == ("INVALID_REQUEST", "ppserve")
    assert [violation.field for violation in bad.field_violations] == ["sampling.top_p", "sampling.n"]
    assert engine.requests == []


async def test_full_queue_says_when_to_retry(engine: FakeEngine, stub: GenerationServiceStub) -> None:
    engine.refusal = Overloaded("the queue is full", 1.5)
    failure = await failure_of(stub.Generate(ask()))
    assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    reason, retry = details(failure)
    assert (reason.reason, retry.retry_delay.ToTimedelta().total_seconds()) == ("QUEUE_FULL", 1.5)


async def test_unforeseen_errors_tell_clients_nothing(engine: FakeEngine, stub: GenerationServiceStub) -> None:
    engine.refusal = ValueError("secret")
    failure = await failure_of(stub.Generate(ask()))
    assert failure.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(failure.details())
    assert "secret" not in str(failure.trailing_metadata())


async def test_a_refusal_is_logged_with_id_and_fields_and_nothing_the_client_wrote(
    stub: GenerationServiceStub, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "ppserve"):
        wrong = {"sampling": pb.SamplingParams(top_p=7, logit_bias={99999: 1, 88888: 1})}
        calls = [
            stub.Generate(ask(request_id=name, **wrong))
            for name in ("mine", "two\nlines", "", "naïve", "x" * 10_000)
        ]
        ids = []
        for call in calls:
            assert await code_of(call) is grpc.StatusCode.INVALID_ARGUMENT
            ids.append(dict(await call.trailing_metadata())["x-request-id"])
        assert ids[0] == "mine"
        lines = {record.request_id: record for record in caplog.records if hasattr(record, "fields")}
        assert set(lines) == set(ids)
        assert lines["mine"].fields == "sampling.top_p, sampling.logit_bias"
        named = "(sampling.top_p, sampling.logit_bias)"
        assert lines["mine"].getMessage() == f"request mine: INVALID_REQUEST {named}"
        assert lines[ids[1]].fields == "request_id"
        assert not any(text in caplog.text for text in ("two", "99999", "hello"))


async def test_bytes_that_are_no_message_are_refused_and_counted_and_none_is_decompressed() -> None:
    """A few kilobytes may hold megabytes; gRPC would make room for them before it looks at their size."""
    engine = FakeEngine()
    async with served(engine) as (_, target), channel_to(target) as channel:
        generate, good = channel.unary_stream(GENERATE), ask().SerializeToString()
        for raw in (b"\xff\xff\xff", b"\x12\x02\xff\xfe", b"\x0a\xff"):
            call = generate(raw)
            assert await code_of(call) is grpc.StatusCode.INVALID_ARGUMENT
            assert (await call.details()).startswith("not a GenerateRequest")
        assert [error.status for error in engine.refused] == ["INVALID_ARGUMENT"] * 3
        assert await code_of(generate(b"\x00" * (600 << 10))) is grpc.StatusCode.RESOURCE_EXHAUSTED
        for raw in (good, b"\x00" * (8 << 20)):
            compressed = generate(raw, compression=grpc.Compression.Gzip)
            assert await code_of(compressed) is grpc.StatusCode.UNIMPLEMENTED
        assert await code_of(generate(good)) is grpc.StatusCode.OK


@pytest.mark.slow
async def test_metadata_has_a_limit_and_is_told(stub: GenerationServiceStub) -> None:
    limit = (await stub.GetModelInfo(pb.GetModelInfoRequest())).limits.max_metadata_bytes
    within, beyond = ((("x-padding", "x" * size),) for size in (limit - 1024, limit))
    for _ in range(8):
        assert await code_of(stub.Generate(ask(), metadata=within)) is grpc.StatusCode.OK
        assert await code_of(stub.Generate(ask(), metadata=beyond)) is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_tokens_only_without_a_tokenizer() -> None:
    async with (
        served(FakeEngine(description=replace(CARD, has_tokenizer=False))) as (_, target),
        stub_of(target) as stub,
    ):
        assert await code_of(stub.Tokenize(pb.TokenizeRequest(text="a"))) is grpc.StatusCode.INVALID_ARGUMENT
        assert await code_of(stub.Detokenize(pb.DetokenizeRequest())) is grpc.StatusCode.INVALID_ARGUMENT
        parsed = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]), output=pb.OutputOptions(token_ids=True))
        messages = [message async for message in stub.Generate(parsed)]
        assert sum(len(message.tokens) for message in messages) == 62
