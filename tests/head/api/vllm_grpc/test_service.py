"""`vllm.grpc.engine` over a real gRPC server in this process, with an engine that has no model."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ppserve.config import ServerSettings
from ppserve.core.request import FinishReason
from ppserve.errors import InvalidRequest
from ppserve.grammar.structured_output import StructuredOutput
from ppserve.head.api.grpc.server import GrpcServer
from ppserve.head.api.stream import AT_THE_END
from ppserve.head.api.vllm_grpc.messages import names_of, request_options
from ppserve.head.engine.streams import TokenOutput
from ppserve.vllm import engine_pb2 as pb
from ppserve.vllm.engine_pb2_grpc import VllmEngineStub
from tests.fake_engine import CARD, EOS, FakeEngine, channel_to, code_of, drawn_token, served
from tests.head.api.grpc.asking import failure_of
from tests.head.api.http.test_completions import ENDS

SERVICE = "vllm.grpc.engine.VllmEngine"
OK, NOTHING = grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED


@asynccontextmanager
async def served_vllm(engine: FakeEngine, **settings: object) -> AsyncIterator[tuple[VllmEngineStub, GrpcServer]]:
    async with served(engine, ServerSettings(port=0, vllm_grpc=True, **settings)) as (door, target):
        async with channel_to(target) as channel:
            yield VllmEngineStub(channel), door


@pytest.fixture
async def opened(engine: FakeEngine) -> AsyncIterator[tuple[VllmEngineStub, GrpcServer]]:
    async with served_vllm(engine) as opened:
        yield opened


@pytest.fixture
def stub(opened: tuple[VllmEngineStub, GrpcServer]) -> VllmEngineStub:
    return opened[0]


@pytest.fixture
def door(opened: tuple[VllmEngineStub, GrpcServer]) -> GrpcServer:
    return opened[1]


def ask(stream: bool, text: str = "hello", request_id: str = "", **params: object) -> pb.GenerateRequest:
    params.setdefault("max_tokens", 5)
    sampling = pb.SamplingParams(**params)
    return pb.GenerateRequest(text=text, sampling_params=sampling, stream=stream, request_id=request_id)


async def answers_to(stub: VllmEngineStub, message: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [answer async for answer in stub.Generate(message)]


def of_index(answers: list[pb.GenerateResponse], index: int) -> tuple[list[pb.GenerateStreamChunk], object]:
    chunks = [answer.chunk for answer in answers if answer.HasField("chunk") and answer.chunk.index == index]
    (end,) = [a.complete for a in answers if a.HasField("complete") and a.complete.index == index]
    return chunks, end


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stream_has_chunks_of_what_is_new_and_each_sequence_has_one_end_with_all_of_it(
    engine: FakeEngine, stub: VllmEngineStub, stream: bool
) -> None:
    answers = await answers_to(stub, ask(stream, n=3, seed=7, logprobs=2, prompt_logprobs=0))
    for index in range(3):
        chunks, end = of_index(answers, index)
        expected = [drawn_token(engine.requests[0], index, offset) for offset in range(5)]
        assert bool(chunks) is stream
        assert [i for chunk in chunks for i in chunk.token_ids] == (expected if stream else [])
        assert [i for chunk in chunks for i in chunk.output_logprobs.token_ids] == (expected if stream else [])
        assert {x for part in [end, *chunks] for x in part.output_logprobs.token_logprobs} == {-0.5}
        assert all(chunk.completion_tokens == len(chunk.token_ids) for chunk in chunks)
        assert list(end.output_ids) == list(end.output_logprobs.token_ids) == expected
        assert (end.finish_reason, end.prompt_tokens, end.completion_tokens) == ("length", 5, 5)
        assert end.cached_tokens == 3
        top = end.output_logprobs.top_logprobs[0]
        assert (list(top.token_ids), list(top.values)) == ([expected[0], expected[0] + 1], [-0.5, -1.5])
        for scores in [end.input_logprobs, *(chunk.input_logprobs for chunk in chunks[:1])]:
            assert list(scores.token_ids) == list(b"hello")
            assert not scores.token_logprobs[0].HasField("value")
            assert [score.value for score in scores.token_logprobs[1:]] == [-float(c) for c in b"ello"]
        assert not any(chunk.HasField("input_logprobs") for chunk in chunks[1:])


async def test_without_stream_the_ends_come_by_index_whichever_is_first(
    engine: FakeEngine, stub: VllmEngineStub
) -> None:
    """smg numbers a request's choices as their ends arrive."""
    engine.by_hand = True
    call = stub.Generate(ask(False, n=3))
    await engine.until(lambda engine: bool(engine.requests))
    sink = engine.sinks[engine.requests[0].id]
    for index in (2, 0, 1):
        sink([TokenOutput(index, 0, 100 + index, finish=FinishReason.MAX_TOKENS)])
        await asyncio.sleep(0)
    ends = [answer.complete async for answer in call]
    assert [(end.index, list(end.output_ids)) for end in ends] == [(0, [100]), (1, [101]), (2, [102])]


async def test_zeros_mean_nothing_special_and_what_is_unset_has_its_default(
    engine: FakeEngine, stub: VllmEngineStub
) -> None:
    tokenized = pb.TokenizedInput(original_text="ignored", input_ids=[72, 73])
    (answer,) = await answers_to(stub, pb.GenerateRequest(tokenized=tokenized))
    assert not answer.complete.HasField("output_logprobs")
    assert not answer.complete.HasField("input_logprobs")
    await answers_to(stub, ask(False, temperature=0, seed=-1, top_p=0.5, repetition_penalty=1.5, stop=["x"]))
    bare, given = engine.requests
    assert bare.prompt_ids == (72, 73)
    assert (bare.sampling.temperature, bare.sampling.top_p, bare.sampling.repetition_penalty) == (1, 1, 1)
    assert (bare.sampling.top_k, bare.sampling.min_p, bare.num_sequences) == (0, 0, 1)
    assert (bare.stop.max_tokens, bare.length_end) == (CARD.max_context - 2, "CONTEXT_LENGTH")
    drawn = given.sampling
    assert (drawn.temperature, drawn.top_p, drawn.repetition_penalty) == (0, 0.5, 1.5)
    assert (given.sampling.seed, given.stop.stop) == (2**64 - 1, ("x",))


@pytest.mark.parametrize(("reason", "matched", "said"), ENDS)
async def test_ends_have_the_protocols_words(
    engine: FakeEngine, stub: VllmEngineStub, reason: FinishReason, matched: int | str | None, said: object
) -> None:
    engine.by_hand = True
    call = stub.Generate(ask(False))
    await engine.until(lambda engine: bool(engine.requests))
    engine.sinks[engine.requests[0].id]([TokenOutput(0, 0, finish=reason, matched=matched)])
    (answer,) = [answer async for answer in call]
    end = answer.complete
    which = end.WhichOneof("matched_stop")
    assert (end.finish_reason, getattr(end, which) if which else None) == said


@pytest.mark.parametrize("stream", [False, True])
async def test_an_end_at_the_deadline_is_a_status(engine: FakeEngine, stub: VllmEngineStub, stream: bool) -> None:
    """`abort` would say that somebody asked for it. A stream has had what was made in time."""
    engine.by_hand = True
    call = stub.Generate(ask(stream))
    await engine.until(lambda engine: bool(engine.requests))
    engine.sinks[engine.requests[0].id]([TokenOutput(0, 0, 65, finish=FinishReason.DEADLINE)])
    if stream:
        assert list((await anext(aiter(call))).chunk.token_ids) == [65]
    assert await code_of(call) is grpc.StatusCode.DEADLINE_EXCEEDED


COMPOSITE: dict[str, object] = {
    "logit_bias": {5: 1.0}, "stop": ["x"], "stop_token_ids": [3], "choice": pb.Choices(choices=["a"]),
    "json_object": True,
}  # fmt: skip
REFUSED = {
    "structural_tag",
}
FORMS = {
    "json_schema": StructuredOutput("json_schema", "a"),
    "regex": StructuredOutput("regex", "a"),
    "grammar": StructuredOutput("grammar", "a"),
    "choice": StructuredOutput("choice", '["a"]'),
    "json_object": StructuredOutput("json_object"),
}
BY_TYPE: dict[type, object] = {bool: True, int: 3, float: 0.5, str: "a"}


@pytest.mark.parametrize("field", [field.name for field in pb.SamplingParams.DESCRIPTOR.fields])
def test_every_field_becomes_an_option_or_is_refused(field: str) -> None:
    value = COMPOSITE.get(field) or BY_TYPE[type(getattr(pb.SamplingParams(), field))]
    message = pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(**{field: value}))
    if field in REFUSED:
        with pytest.raises(InvalidRequest, match=f"^sampling_params.{field}: not served$"):
            request_options(message)
        return
    given, _ = request_options(message)
    if (form := FORMS.get(field)) is not None:
        assert given.structured_output == form
        assert names_of(message)["structured_output"] == f"sampling_params.{field}"
        return
    name = {"include_stop_str_in_output": "include_stop"}.get(field, field)
    assert given.said() == {"stream_interval": AT_THE_END, name: value}


def text(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="a", **fields)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (ask(True, top_p=2), "sampling_params.top_p"),
        (ask(True, logprobs=-1), "sampling_params.logprobs"),
        (ask(True, max_tokens=1, min_tokens=2), "sampling_params.min_tokens"),
        (ask(True, regex="(a"), "sampling_params.regex"),
        (ask(True, json_schema='{"not": {}}'), "sampling_params.json_schema"),
        (ask(True, structural_tag="a"), "sampling_params.structural_tag"),
        (ask(True, truncate_prompt_tokens=-2), "sampling_params.truncate_prompt_tokens"),
        (ask(True, logit_bias={-1: 1.0}), "sampling_params.logit_bias[-1]"),
        (ask(True, text="x" * 65), "text"),
        (ask(True, request_id="\u00fc"), "request_id"),
        (pb.GenerateRequest(), "input"),
        (pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[999])), "tokenized.input_ids[0]"),
        (text(mm_inputs=pb.MultimodalInputs()), "mm_inputs"),
        (text(kv_transfer_params_json="{}"), "kv_transfer_params_json"),
        (text(kv_transfer_params=pb.KvTransferParams()), "kv_transfer_params"),
        (text(data_parallel_rank=1), "data_parallel_rank"),
    ],
)
async def test_what_is_wrong_is_named_as_the_protocol_names_it(
    engine: FakeEngine, stub: VllmEngineStub, wrong: pb.GenerateRequest, field: str
) -> None:
    failure = await failure_of(stub.Generate(wrong))
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(failure.details()).startswith(f"{field}: ")
    assert [error.status for error in engine.refused] == ["INVALID_ARGUMENT"]


async def test_abort_ends_the_caller_s_own_requests_of_that_name(engine: FakeEngine, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef\nfedcba9876543210\n")
    engine.by_hand = True
    async with served_vllm(engine, api_key_file=keys) as (stub, _):
        mine, others = ((("authorization", f"Bearer {key}"),) for key in keys.read_text().split())
        calls = [stub.Generate(ask(True, request_id=name), metadata=mine) for name in ("one", "two", "one")]
        await engine.until(lambda engine: len(engine.requests) == 3)
        await stub.Abort(pb.AbortRequest(request_ids=["one"]), metadata=others)
        assert not engine.cancelled
        await stub.Abort(pb.AbortRequest(request_ids=["one", "nobody"]), metadata=mine)
        await engine.until(lambda engine: len(engine.cancelled) == 2)
        assert [name.partition("/")[0] for name in engine.cancelled] == ["one", "one"]
        for call in calls:
            call.cancel()


async def test_what_the_engine_is_and_how_full(stub: VllmEngineStub) -> None:
    model = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.model_path, model.served_model_name, model.is_generation) == ("fake", "fake", True)
    assert (model.max_context_length, model.max_req_input_len, model.vocab_size) == (64, 64, 257)
    assert (list(model.eos_token_ids), list(model.architectures)) == ([EOS], ["GPT2LMHeadModel"])
    server = await stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.active_requests, server.server_type, server.data_parallel_size) == (0, "vllm-grpc", 1)
    (load,) = (await stub.GetLoads(pb.GetLoadsRequest(include=["core"]))).loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (2, 1, 3)
    assert (load.token_usage, load.num_used_tokens, load.max_total_num_tokens) == (0.25, 256, 1024)


@pytest.mark.parametrize(
    ("differences", "kind", "architecture"),
    [
        ({}, "gpt2", "GPT2LMHeadModel"),
        ({"model_type": "qwen3", "model_class": "Qwen3ForCausalLM"}, "qwen3", "Qwen3ForCausalLM"),
    ],
)
async def test_a_model_says_its_family_and_all_its_ends_and_its_tokenizer_is_an_archive_with_a_digest(
    tmp_path: Path, differences: dict[str, object], kind: str, architecture: str
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    arch = replace(CARD.architecture, eos_ids=(EOS, 7), **differences)  # type: ignore[arg-type]
    async with served_vllm(FakeEngine(description=replace(CARD, architecture=arch)), chat_template=template) as (
        stub,
        _,
    ):
        model = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (model.model_type, list(model.architectures)) == (kind, [architecture])
        assert (list(model.eos_token_ids), model.bos_token_id) == ([EOS, 7], EOS)
        archive = await archive_of(stub)
        config = json.loads(archive.read("config.json"))
        assert (config["model_type"], config["eos_token_id"]) == (kind, [EOS, 7])
        assert archive.read("tokenizer.json") == b"{}"
        assert archive.read("chat_template.jinja") == b"{{ messages }}"
        assert json.loads(archive.read("tokenizer_config.json"))["eos_token"] == "<eos>"


async def archive_of(stub: VllmEngineStub) -> zipfile.ZipFile:
    """The tokenizer's, its digest checked."""
    parts = [part async for part in stub.GetTokenizer(pb.GetTokenizerRequest())]
    content = b"".join(part.data for part in parts)
    assert [part.sha256 for part in parts] == [""] * (len(parts) - 1) + [hashlib.sha256(content).hexdigest()]
    return zipfile.ZipFile(io.BytesIO(content))


async def test_without_a_tokenizer_there_is_no_archive() -> None:
    async with served_vllm(FakeEngine(description=replace(CARD, has_tokenizer=False))) as (stub, _):
        assert await code_of(stub.GetTokenizer(pb.GetTokenizerRequest())) is grpc.StatusCode.INVALID_ARGUMENT
        assert (await stub.GetModelInfo(pb.GetModelInfoRequest())).tokenizer_path == ""


async def test_health_follows_the_server_under_both_names(stub: VllmEngineStub, door: GrpcServer) -> None:
    assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
    door.request_handler.set_serving(False)
    answer = await stub.HealthCheck(pb.HealthCheckRequest())
    assert not answer.healthy
    assert answer.message


async def listed(channel: aio.Channel) -> set[str]:
    parsed = reflection_pb2.ServerReflectionRequest(list_services="")
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    (answer,) = [answer async for answer in reflection.ServerReflectionInfo(iter([parsed]))]
    return {service.name for service in answer.list_services_response.service}


@pytest.mark.parametrize("is_on", [False, True])
async def test_it_is_there_only_where_it_is_asked_for(is_on: bool) -> None:
    """Routers find out who they speak to by asking: others' services, and what we lack, must be UNIMPLEMENTED."""
    async with served(FakeEngine(), ServerSettings(port=0, vllm_grpc=is_on)) as (_, target):
        async with channel_to(target) as channel:
            assert (SERVICE in await listed(channel)) is is_on
            stub = VllmEngineStub(channel)
            assert await code_of(stub.HealthCheck(pb.HealthCheckRequest())) is (OK if is_on else NOTHING)
            for method in (f"{SERVICE}/Embed", f"{SERVICE}/SubscribeKvEvents",
                           "sglang.grpc.scheduler.SglangScheduler/HealthCheck"):  # fmt: skip
                assert await code_of(channel.unary_unary(f"/{method}")(b"")) is NOTHING
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
            assert await code_of(health) is (OK if is_on else grpc.StatusCode.NOT_FOUND)
