"""What a message asks for, as plain values; and that errors name the message's fields."""

from __future__ import annotations

from dataclasses import fields

import pytest

from ppserve.errors import InvalidRequest
from ppserve.head.api.grpc.messages import asked_from
from ppserve.head.api.requests import ParsedRequest, check
from ppserve.v1 import generation_pb2 as pb
from tests.fake_engine import CARD
from tests.head.api.test_requests import REFUSED

PARTS = {"sampling": pb.SamplingParams, "stop": pb.StopConditions, "output": pb.OutputOptions}
FIELDS = [(home, field.name) for home, part in PARTS.items() for field in part.DESCRIPTOR.fields]
COMPOSITE = {"logit_bias": {5: 1.0}, "stop": ["x"], "stop_token_ids": [3]}
BY_TYPE = {bool: True, int: 3, float: 0.5}


def test_an_empty_message_asks_for_the_defaults() -> None:
    assert asked_from(pb.GenerateRequest()) == ParsedRequest(prompt=[])


@pytest.mark.parametrize(("home", "field"), FIELDS)
def test_every_field_arrives_under_its_name(home: str, field: str) -> None:
    part = PARTS[home]
    value = COMPOSITE.get(field) or BY_TYPE[type(getattr(part(), field))]
    parsed = asked_from(pb.GenerateRequest(**{home: part(**{field: value})}))
    assert getattr(parsed, field) == value
    changed = [
        f.name
        for f in fields(ParsedRequest)
        if getattr(parsed, f.name) != getattr(ParsedRequest(prompt=[]), f.name)
    ]
    assert changed == [field]


def test_prompt_name_priority_and_resume() -> None:
    message = pb.GenerateRequest(
        text="hello", request_id="mine", priority=-3, resume=pb.ResumeFrom(generated_token_ids=[4, 5])
    )
    parsed = asked_from(message)
    assert (parsed.prompt, parsed.request_id, parsed.priority) == ("hello", "mine", -3)
    assert parsed.resume is not None
    assert (parsed.resume.index, list(parsed.resume.ids)) == (0, [4, 5])
    assert list(asked_from(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]))).prompt) == [1, 2]
    assert asked_from(pb.GenerateRequest(text="")).prompt == ""


def test_zero_is_not_the_default() -> None:
    zeros = asked_from(
        pb.GenerateRequest(
            sampling=pb.SamplingParams(temperature=0, seed=0, n=0),
            stop=pb.StopConditions(max_tokens=0),
            output=pb.OutputOptions(logprobs=0),
        )
    )
    assert (zeros.temperature, zeros.seed, zeros.n, zeros.max_tokens, zeros.logprobs) == (0.0, 0, 0, 0, 0)


@pytest.mark.parametrize(("parsed", "named"), REFUSED)
def test_errors_name_fields_of_the_message(parsed: ParsedRequest, named: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check(parsed, CARD)
    for violation in refusal.value.violations:
        descriptor = pb.GenerateRequest.DESCRIPTOR
        for name in violation.field.partition("[")[0].split("."):
            found = descriptor.fields_by_name.get(name) or descriptor.oneofs_by_name[name]
            descriptor = getattr(found, "message_type", None)
