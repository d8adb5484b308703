"""The service over a real gRPC server in this process, with an engine that has no model."""

from __future__ import annotations

import grpc

from ppserve.core.request import FinishReason
from ppserve.head.engine.streams import TokenOutput
from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.fake_engine import (
    ByteCodec,
    FakeEngine,
    code_of,
    drawn_token,
)
from tests.head.api.grpc.asking import ask, run


def test_tokens_text_finish_usage_and_seed() -> None:
    async def scenario(engine: FakeEngine, stub: GenerationServiceStub) -> None:
        parsed = ask(
            request_id="mine", sampling=pb.SamplingParams(seed=7), output=pb.OutputOptions(token_ids=True)
        )
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

    run(scenario)


def test_n_sequences_echo_logprobs_and_timings() -> None:
    async def scenario(engine: FakeEngine, stub: GenerationServiceStub) -> None:
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

    run(scenario)


def test_scoring_without_generating() -> None:
    async def scenario(engine: FakeEngine, stub: GenerationServiceStub) -> None:
        messages = [m async for m in stub.Generate(ask(max_tokens=0, output=pb.OutputOptions(prompt_logprobs=1)))]
        assert len(messages) == 1
        assert len(messages[0].prompt_tokens) == 5
        assert (messages[0].num_tokens, messages[0].usage.completion_tokens) == (0, 0)
        assert messages[0].finish.reason == pb.Finish.MAX_TOKENS

    run(scenario)


def test_what_matched_is_named() -> None:
    async def scenario(engine: FakeEngine, stub: GenerationServiceStub) -> None:
        call = stub.Generate(ask(sampling=pb.SamplingParams(n=2)))
        await engine.until(lambda engine: bool(engine.sinks))
        next(iter(engine.sinks.values())).push(
            [
                TokenOutput(0, 0, 104, "h", finish=FinishReason.STOP_STRING, matched="stop!"),
                TokenOutput(1, 0, 256, "", finish=FinishReason.EOS, matched=256),
            ]
        )
        finishes = {message.index: message.finish async for message in call}
        assert (finishes[0].reason, finishes[0].stop) == (pb.Finish.STOP_STRING, "stop!")
        assert (finishes[1].reason, finishes[1].token_id) == (pb.Finish.EOS, 256)

    run(scenario, by_hand=True)


def test_cancelling_reaches_the_engine() -> None:
    async def scenario(engine: FakeEngine, stub: GenerationServiceStub) -> None:
        call = stub.Generate(ask())
        await engine.until(lambda engine: bool(engine.requests))
        call.cancel()
        await engine.until(lambda engine: bool(engine.cancelled))
        assert engine.cancelled == {engine.requests[0].id: FinishReason.CANCELLED}

    run(scenario, by_hand=True)


def test_deadline_reaches_the_engine() -> None:
    async def scenario(engine: FakeEngine, stub: GenerationServiceStub) -> None:
        assert await code_of(stub.Generate(ask(), timeout=0.3)) is grpc.StatusCode.DEADLINE_EXCEEDED
        await engine.until(lambda engine: bool(engine.cancelled))
        assert engine.cancelled == {engine.requests[0].id: FinishReason.DEADLINE}

    run(scenario, by_hand=True)


def test_an_end_at_the_deadline_is_told_with_what_was_made() -> None:
    async def scenario(engine: FakeEngine, stub: GenerationServiceStub) -> None:
        call = stub.Generate(ask())
        await engine.until(lambda engine: bool(engine.requests))
        engine.sinks[engine.requests[0].id].push([TokenOutput(0, 0, 65, "A", finish=FinishReason.DEADLINE)])
        (answer,) = [message async for message in call]
        assert (answer.text, answer.finish.reason) == ("A", pb.Finish.DEADLINE)

    run(scenario, by_hand=True)


def test_inventing_keys_does_not_make_many_callers() -> None:
    async def scenario(engine: FakeEngine, stub: GenerationServiceStub) -> None:
        for key in ("one", "two", None):
            metadata = None if key is None else (("authorization", f"Bearer {key}"),)
            [message async for message in stub.Generate(ask(), metadata=metadata)]
        assert [request.caller for request in engine.requests] == ["ipv4:127.0.0.1"] * 3

    run(scenario)


def test_id_and_traceparent_come_back_as_metadata() -> None:
    async def scenario(engine: FakeEngine, stub: GenerationServiceStub) -> None:
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        call = stub.Generate(ask(request_id="mine"), metadata=(("traceparent", parent),))
        [message async for message in call]
        metadata = dict(await call.trailing_metadata())
        assert (metadata["x-request-id"], metadata["traceparent"]) == ("mine", parent)

    run(scenario)


def test_tokenize_and_detokenize() -> None:
    async def scenario(engine: FakeEngine, stub: GenerationServiceStub) -> None:
        tokens = (await stub.Tokenize(pb.TokenizeRequest(text="é!"))).tokens
        assert [(token.id, token.bytes) for token in tokens] == [(0xC3, b"\xc3"), (0xA9, b"\xa9"), (33, b"!")]
        text = await stub.Detokenize(pb.DetokenizeRequest(token_ids=pb.TokenIds(ids=[0xC3, 0xA9, 0xC3])))
        assert (text.text, text.bytes) == ("é\ufffd", b"\xc3\xa9\xc3")
        bad = pb.DetokenizeRequest(token_ids=pb.TokenIds(ids=[5000]))
        assert await code_of(stub.Detokenize(bad)) is grpc.StatusCode.INVALID_ARGUMENT
        long = "x" * 20_000
        assert len((await stub.Tokenize(pb.TokenizeRequest(text=long))).tokens) == 20_000

    run(scenario)


def test_model_and_topology() -> None:
    async def scenario(engine: FakeEngine, stub: GenerationServiceStub) -> None:
        model = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (model.model, model.max_context, model.eos_token_id, model.limits.max_n) == ("fake", 64, 256, 16)
        assert model.architecture.num_parameters == 12345
        stage = (await stub.GetTopology(pb.GetTopologyRequest())).stages[0]
        assert (stage.device, stage.num_layers, stage.bubble_seconds["host"]) == ("cpu", 2, 0.5)
        assert stage.HasField("predicted_step_seconds")
        assert not stage.HasField("measured_step_seconds")

    run(scenario)
