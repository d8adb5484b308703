"""What a message asks for, as a request's fields; and that errors name the message's fields."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from google.protobuf.message import Message

from ppserve.head.api.grpc.messages import request_fields
from ppserve.head.descriptions import Limits, RankDescription, StageDescription, Topology
from ppserve.head.engine.streams import TimingsOutput
from ppserve.v1 import generation_pb2 as pb
from tests.head.api.test_requests import REFUSED, fields_refused, made

PARTS = {"sampling": pb.SamplingParams, "stop": pb.StopConditions, "output": pb.OutputOptions}
FIELDS = [(home, field.name) for home, part in PARTS.items() for field in part.DESCRIPTOR.fields]
COMPOSITE = {"logit_bias": {5: 1.0}, "stop": ["x"], "stop_token_ids": [3]}
BY_TYPE = {bool: True, int: 3, float: 0.5}


@pytest.mark.parametrize(("home", "field"), FIELDS)
def test_every_field_arrives_under_its_name_and_reaches_the_core(home: str, field: str) -> None:
    part = PARTS[home]
    value = COMPOSITE.get(field) or BY_TYPE[type(getattr(part(), field))]
    given, _ = request_fields(pb.GenerateRequest(**{home: part(**{field: value})}))
    assert given == {"priority": 0, field: value}
    assert made(**given) != made()


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        (pb.Stage, StageDescription), (pb.StageRank, RankDescription),
        (pb.GetTopologyResponse, Topology), (pb.Limits, Limits), (pb.Timings, TimingsOutput),
    ],
)  # fmt: skip
def test_nothing_that_is_described_is_left_out(kind: type[Message], record: type) -> None:
    names = {re.sub("_s$", "_seconds", field.name) for field in fields(record)}
    assert names - set(kind.DESCRIPTOR.fields_by_name) <= {"steps"}, "of these only the library tells"


def test_prompt_priority_and_resume() -> None:
    message = pb.GenerateRequest(text="hello", priority=-3, resume=pb.ResumeFrom(generated_token_ids=[4, 5]))
    given, prompt = request_fields(message)
    given["resume_ids"] = list(given["resume_ids"])
    assert (given, prompt) == ({"priority": -3, "resume_index": 0, "resume_ids": [4, 5]}, "hello")
    for empty in (pb.GenerateRequest(), pb.GenerateRequest(text="")):
        given, prompt = request_fields(empty)
        assert (given, len(prompt)) == ({"priority": 0}, 0)
    assert list(request_fields(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2])))[1]) == [1, 2]


def test_zero_is_not_the_default() -> None:
    sampling, stop = pb.SamplingParams(temperature=0, seed=0, n=0), pb.StopConditions(max_tokens=0)
    output = pb.OutputOptions(logprobs=0)
    given, _ = request_fields(pb.GenerateRequest(sampling=sampling, stop=stop, output=output))
    assert given == {"priority": 0, "temperature": 0.0, "seed": 0, "n": 0, "max_tokens": 0, "logprobs": 0}


@pytest.mark.parametrize(("given", "_named"), REFUSED)
def test_errors_name_fields_of_the_message(given: dict[str, object], _named: str) -> None:
    for field in fields_refused(**given):
        descriptor = pb.GenerateRequest.DESCRIPTOR
        for name in field.partition("[")[0].split("."):
            found = descriptor.fields_by_name.get(name) or descriptor.oneofs_by_name[name]
            descriptor = getattr(found, "message_type", None)
