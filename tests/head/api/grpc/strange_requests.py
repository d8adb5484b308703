"""Requests as nobody would write them, made from the protos themselves: for fuzzing."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from ppserve.v1 import generation_pb2 as pb
from ppserve.vllm import engine_pb2 as vllm

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
