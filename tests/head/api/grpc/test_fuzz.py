"""Strange requests, made from the protos, get documented statuses in both gRPC protocols and harm no other."""

from __future__ import annotations

import os
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ppserve.config import ServerSettings
from ppserve.errors import InvalidRequest
from ppserve.head.api.call import Call
from ppserve.head.api.grpc.messages import request_options
from ppserve.head.api.requests import to_request
from ppserve.v1 import generation_pb2 as pb
from ppserve.vllm import engine_pb2 as vllm
from tests.fake_engine import CARD, FakeEngine, channel_to, code_of, served

_small = st.integers(0, 40)
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: _small | st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: _small | st.integers(0, 300) | st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: _small | st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: _small | st.integers(0, 2**64 - 1),
}
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    **_INTEGERS,
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32) | st.sampled_from([0.0, 1.0, -1.0, 0.5]),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_STRING: st.text(max_size=80),
}
# Of vLLM's protocol. With most of them in most messages, nearly all would be refused for these alone.
_UNSERVED = (
    *("mm_inputs", "kv_transfer_params", "kv_transfer_params_json", "data_parallel_rank"),
    *("json_schema", "grammar", "structural_tag", "json_object", "choice", "truncate_prompt_tokens"),
)


def messages(kind: Any) -> st.SearchStrategy[Any]:
    """Messages with any of their fields, each with any of its values."""
    values = {field.name: _values(field) for field in kind.DESCRIPTOR.fields if field.name not in _UNSERVED}
    maybe = {name: value for name, value in values.items() if value is not None}
    return st.fixed_dictionaries({}, optional=maybe).map(lambda chosen: kind(**chosen))


def _values(field: FieldDescriptor) -> st.SearchStrategy[Any] | None:
    inner = field.message_type
    if inner is None:
        value = _SCALARS.get(field.cpp_type)
    elif inner.GetOptions().map_entry:
        return st.dictionaries(*(_SCALARS[inner.fields_by_name[part].cpp_type] for part in ("key", "value")))
    else:
        value = messages(GetMessageClass(inner)) if inner.file == field.file else None
    return st.lists(value, max_size=70) if field.is_repeated and value is not None else value


requests = messages(pb.GenerateRequest)
vllm_requests = messages(vllm.GenerateRequest).map(lambda message: message.SerializeToString())


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A message with some of its bytes changed, or bytes that were never one."""
    raw = bytearray(draw(requests).SerializeToString())
    for _ in range(draw(st.integers(0, 4))):
        if raw:
            raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return draw(st.sampled_from([bytes(raw), draw(st.binary(max_size=200))]))


OURS, VLLM = "/ppserve.v1.GenerationService", "/vllm.grpc.engine.VllmEngine"
EXAMPLES = int(os.environ.get("PPSERVE_FUZZ_EXAMPLES", "200"))
quick = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
# Each example is a server of its own: shrinking one that fails would take minutes.
served_each = settings(quick, max_examples=max(1, EXAMPLES // 10), phases=[Phase.reuse, Phase.generate])
METHODS = [f"{OURS}/{name}" for name in ("Generate", "Tokenize", "Detokenize", "GetModelInfo", "GetTopology")]
strange = (
    st.tuples(st.just(f"{OURS}/Generate"), requests.map(pb.GenerateRequest.SerializeToString))
    | st.tuples(st.sampled_from(METHODS), damaged())
    | st.tuples(st.just(f"{VLLM}/Generate"), vllm_requests | st.binary(max_size=200))
)


@given(requests)
@quick
def test_a_request_is_refused_or_within_all_limits(message: pb.GenerateRequest) -> None:
    try:
        given, _ = request_options(message)
        made = to_request(given, message.token_ids.ids or message.text.encode(), CARD, Call("x", 1))
    except InvalidRequest:
        return
    held = len(made.prompt_ids) + len(made.resume_ids)
    assert 0 < len(made.prompt_ids) <= CARD.max_context
    assert held + (made.stop.max_tokens > len(made.resume_ids)) <= CARD.max_context
    assert len(made.prompt_ids) + made.stop.max_tokens <= CARD.max_context
    assert 1 <= made.num_sequences <= CARD.limits.max_n
    assert made.sampling.temperature == 0 or 1e-4 <= made.sampling.temperature * 1.001 <= 101
    assert 0 < made.sampling.top_p <= 1
    assert all(token < CARD.architecture.vocab_size for token, _ in made.sampling.logit_bias)


@given(st.lists(strange, min_size=5, max_size=20))
@served_each
async def test_strange_messages_get_documented_statuses(messages: list[tuple[str, bytes]]) -> None:
    async with served(FakeEngine(), ServerSettings(port=0, vllm_grpc=True)) as (_, target):
        async with channel_to(target) as channel:
            generate = channel.unary_stream(f"{OURS}/Generate")
            canary = pb.GenerateRequest(text="canary", sampling=pb.SamplingParams(seed=1), request_id="canary")
            sung = canary.SerializeToString()

            async def song() -> str:
                messages = [pb.GenerateResponse.FromString(answer) async for answer in generate(sung)]
                return "".join(message.text for message in messages)

            first = await song()
            codes = {await code_of(channel.unary_stream(method)(raw)) for method, raw in messages}
            assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
            assert await song() == first != ""
