"""What the proto's request becomes, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ppserve.errors import InvalidRequest
from ppserve.head.api.grpc.convert import Arrival, check, to_request
from ppserve.v1 import generation_pb2 as pb
from tests.fake_engine import CARD, EOS

ARRIVAL = Arrival(id="r/0", seed=99, caller="somebody", deadline_s=5.0)
MUTE = replace(CARD, has_tokenizer=False)


def request(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(**fields)


def sampling(**fields: object) -> pb.GenerateRequest:
    return request(sampling=pb.SamplingParams(**fields))


def stop(**fields: object) -> pb.GenerateRequest:
    return request(stop=pb.StopConditions(**fields))


def output(**fields: object) -> pb.GenerateRequest:
    return request(output=pb.OutputOptions(**fields))


def resume(ids: list[int], index: int = 0, n: int = 1, **fields: object) -> pb.GenerateRequest:
    chosen = pb.SamplingParams(seed=1, n=n)
    parts = {"sampling": chosen, "resume": pb.ResumeFrom(index=index, generated_token_ids=ids), **fields}
    return request(**parts)


REFUSED = [
    (sampling(temperature=-0.5), "sampling.temperature"),
    (sampling(temperature=math.nan), "sampling.temperature"),
    (sampling(temperature=math.inf), "sampling.temperature"),
    (sampling(temperature=1e-9), "sampling.temperature"),
    (sampling(top_p=0.0), "sampling.top_p"),
    (sampling(top_p=1.01), "sampling.top_p"),
    (sampling(top_p=math.nan), "sampling.top_p"),
    (sampling(min_p=-0.1), "sampling.min_p"),
    (sampling(min_p=1.5), "sampling.min_p"),
    (sampling(repetition_penalty=0.0), "sampling.repetition_penalty"),
    (sampling(repetition_penalty=1e-38), "sampling.repetition_penalty"),
    (sampling(repetition_penalty=11), "sampling.repetition_penalty"),
    (sampling(frequency_penalty=1e30), "sampling.frequency_penalty"),
    (sampling(presence_penalty=-math.inf), "sampling.presence_penalty"),
    (sampling(n=0), "sampling.n"),
    (sampling(n=17), "sampling.n"),
    (sampling(n=2**32 - 1), "sampling.n"),
    (sampling(logit_bias={257: 1.0}), "sampling.logit_bias[257]"),
    (sampling(logit_bias={3: math.nan}), "sampling.logit_bias[3]"),
    (sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), "sampling.logit_bias"),
    (stop(max_tokens=2, min_tokens=3), "stop.min_tokens"),
    (stop(stop=["a", ""]), "stop.stop[1]"),
    (stop(stop=["x" * 65]), "stop.stop[0]"),
    (stop(stop=["a"] * 5), "stop.stop"),
    (stop(stop=["a"] * 500_000), "stop.stop"),
    (stop(stop_token_ids=[1, 300]), "stop.stop_token_ids[1]"),
    (stop(stop_token_ids=[1] * 65), "stop.stop_token_ids"),
    (output(logprobs=21), "output.logprobs"),
    (output(prompt_logprobs=2**32 - 1), "output.prompt_logprobs"),
    (request(text="x" * (128 * 1024 + 1)), "prompt"),
    (request(token_ids=pb.TokenIds(ids=[0] * 65)), "prompt"),
    (request(token_ids=pb.TokenIds(ids=[0, 257])), "token_ids.ids[1]"),
    (request(request_id="x" * 129), "request_id"),
    (request(request_id="two\nlines"), "request_id"),
    (request(request_id="naïve"), "request_id"),
    (resume([1], index=2, n=2), "resume.index"),
    (resume([1, 400]), "resume.generated_token_ids[1]"),
    (resume([1, 2, 3], stop=pb.StopConditions(max_tokens=2)), "resume.generated_token_ids"),
    (resume([1], sampling=pb.SamplingParams(temperature=0.5)), "sampling.seed"),
]


@pytest.mark.parametrize(("message", "field"), REFUSED)
def test_refused(message: pb.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check(message, CARD)
    assert [violation.field for violation in refusal.value.violations] == [field]


@pytest.mark.parametrize(
    ("message", "field"),
    [(request(text="a"), "prompt"), (stop(stop=["a"]), "stop.stop"), (output(echo=True), "output.echo")],
)
def test_refused_without_tokenizer(message: pb.GenerateRequest, field: str) -> None:
    check(message, CARD)
    with pytest.raises(InvalidRequest) as refusal:
        check(message, MUTE)
    assert [violation.field for violation in refusal.value.violations] == [field]


def test_mistakes_are_reported_together() -> None:
    message = request(
        sampling=pb.SamplingParams(temperature=-1, top_p=2, n=0), stop=pb.StopConditions(stop=["a"] * 9)
    )
    with pytest.raises(InvalidRequest) as refusal:
        check(message, CARD)
    fields = [violation.field for violation in refusal.value.violations]
    assert fields == ["sampling.temperature", "sampling.top_p", "sampling.n", "stop.stop"]


def test_the_whole_range_is_told() -> None:
    message = sampling(temperature=-1, top_p=0, min_p=2, repetition_penalty=0, frequency_penalty=11, n=0)
    with pytest.raises(InvalidRequest) as refusal:
        check(message, CARD)
    assert [violation.problem for violation in refusal.value.violations] == [
        "-1 is outside 0 (greedy) or 0.0001 to 100",
        "0 is not above 0 and at most 1",
        "2 is outside 0 to 1",
        "0 is outside 0.01 to 10",
        "11 is outside -10 to 10",
        "0 sequences; ask for at least one",
    ]


def test_mistakes_are_not_reported_without_end() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check(sampling(logit_bias={1000 + i: 1.0 for i in range(1000)}), CARD)
    assert len(refusal.value.violations) == 8


def test_limits_themselves_are_accepted() -> None:
    check(sampling(temperature=0, top_p=1, min_p=1, repetition_penalty=10), CARD)
    check(sampling(n=16, seed=2**64 - 1, top_k=2**32 - 1), CARD)
    check(stop(stop=["x" * 64] * 4, stop_token_ids=[256] * 64, max_tokens=2**32 - 1), CARD)
    check(output(logprobs=20, prompt_logprobs=20, stream_interval=2**32 - 1), CARD)
    check(request(text="x" * 128 * 1024), CARD)


def test_defaults() -> None:
    made = to_request(request(), [1, 2], CARD, ARRIVAL)
    assert (made.id, made.caller, made.deadline_s, made.prompt_ids) == ("r/0", "somebody", 5.0, (1, 2))
    assert (made.num_sequences, made.resume_index, made.resume_ids, made.priority) == (1, None, (), 0)
    assert (made.sampling.seed, made.sampling.temperature, made.sampling.top_p) == (99, 1.0, 1.0)
    assert (made.sampling.repetition_penalty, made.sampling.top_k, made.sampling.min_p) == (1.0, 0, 0.0)
    assert (made.stop.max_tokens, made.limited_by_context) == (62, True)
    assert (made.output.logprobs, made.output.prompt_logprobs, made.output.stream_interval) == (None, None, 1)


FIELDS = [
    (part, field.name)
    for part in (pb.SamplingParams, pb.StopConditions, pb.OutputOptions)
    for field in part.DESCRIPTOR.fields
]
COMPOSITE = {"logit_bias": {5: 1.0}, "stop": ["x"], "stop_token_ids": [3]}
BY_TYPE = {bool: True, int: 3, float: 0.5}


@pytest.mark.parametrize(("part", "field"), FIELDS, ids=lambda item: getattr(item, "__name__", item))
def test_every_field_reaches_the_core(part: type, field: str) -> None:
    """One that is only checked would be ignored without a word."""
    value = COMPOSITE.get(field) or BY_TYPE[type(getattr(part(), field))]
    home = {pb.SamplingParams: "sampling", pb.StopConditions: "stop", pb.OutputOptions: "output"}[part]
    asked = request(**{home: part(**{field: value})})
    assert to_request(asked, [1], CARD, ARRIVAL) != to_request(request(), [1], CARD, ARRIVAL)


def test_zero_is_not_the_default() -> None:
    zeros = request(sampling=pb.SamplingParams(temperature=0, seed=0), output=pb.OutputOptions(logprobs=0))
    made = to_request(zeros, [1], CARD, ARRIVAL)
    assert (made.sampling.temperature, made.sampling.seed, made.output.logprobs) == (0.0, 0, 0)


@pytest.mark.parametrize(
    ("prompt", "asked", "granted", "by_context"),
    [(10, 5, 5, False), (10, 54, 54, False), (10, 55, 54, True), (63, None, 1, True), (64, 0, 0, False)],
)
def test_max_tokens_and_context(prompt: int, asked: int | None, granted: int, by_context: bool) -> None:
    made = to_request(stop() if asked is None else stop(max_tokens=asked), [1] * prompt, CARD, ARRIVAL)
    assert (made.stop.max_tokens, made.limited_by_context) == (granted, by_context)


@pytest.mark.parametrize(("prompt", "asked"), [(65, 0), (64, 1), (64, None), (1000, 5)])
def test_prompt_beyond_context(prompt: int, asked: int | None) -> None:
    with pytest.raises(InvalidRequest, match="context of 64") as refusal:
        to_request(stop() if asked is None else stop(max_tokens=asked), [1] * prompt, CARD, ARRIVAL)
    assert refusal.value.violations[0].field == "prompt"


def test_empty_prompt_starts_from_end_of_text() -> None:
    assert to_request(request(), [], CARD, ARRIVAL).prompt_ids == (EOS,)
    with pytest.raises(InvalidRequest, match="prompt: empty"):
        to_request(request(), [], replace(CARD, eos_id=None), ARRIVAL)


def test_resume_serves_one_sequence_and_no_prompt_again() -> None:
    options = pb.OutputOptions(echo=True, prompt_logprobs=1)
    made = to_request(resume([7, 8], index=1, n=3, output=options), [1], CARD, ARRIVAL)
    assert (made.num_sequences, made.resume_index, made.resume_ids) == (1, 1, (7, 8))
    assert (made.output.echo, made.output.prompt_logprobs) == (False, None)


def test_resume_before_the_first_token_serves_the_prompt() -> None:
    options = pb.OutputOptions(echo=True, prompt_logprobs=1)
    made = to_request(resume([], output=options), [1], CARD, ARRIVAL)
    assert (made.output.echo, made.output.prompt_logprobs, made.resume_index) == (True, 1, 0)


def test_resume_beyond_the_context() -> None:
    made = to_request(resume([1] * 54), [1] * 10, CARD, ARRIVAL)
    assert (len(made.resume_ids), made.stop.max_tokens, made.limited_by_context) == (54, 54, True)
    with pytest.raises(InvalidRequest, match="55 tokens do not fit the context of 64"):
        to_request(resume([1] * 55), [1] * 10, CARD, ARRIVAL)
