"""What a caller's wishes become, and what is refused; by plain values, as every protocol hands them over."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest

from ppserve.core.request import OutputOptions, SamplingParams, StopConditions
from ppserve.errors import InvalidRequest
from ppserve.head.api.call import Call
from ppserve.head.api.requests import (
    ParsedRequest,
    Resume,
    check,
    check_ids,
    check_text,
    is_fit_for_logs,
    priority_of,
    to_request,
)
from tests.fake_engine import CARD, EOS

CALL = Call("r", serial=0, seed=99, caller="somebody", deadline_s=5.0)
MUTE = replace(CARD, has_tokenizer=False)


def resume(ids: list[int], index: int = 0, **more: object) -> ParsedRequest:
    return ParsedRequest(**{"seed": 1, "resume": Resume(index, ids), **more})


REFUSED = [
    (ParsedRequest(temperature=-0.5), "sampling.temperature"),
    (ParsedRequest(temperature=math.nan), "sampling.temperature"),
    (ParsedRequest(temperature=math.inf), "sampling.temperature"),
    (ParsedRequest(temperature=1e-9), "sampling.temperature"),
    (ParsedRequest(temperature=1e300), "sampling.temperature"),
    (ParsedRequest(top_k=-1), "sampling.top_k"),
    (ParsedRequest(top_k=2**32), "sampling.top_k"),
    (ParsedRequest(top_p=0.0), "sampling.top_p"),
    (ParsedRequest(top_p=1e-300), "sampling.top_p"),
    (ParsedRequest(top_p=1.01), "sampling.top_p"),
    (ParsedRequest(top_p=math.nan), "sampling.top_p"),
    (ParsedRequest(min_p=-0.1), "sampling.min_p"),
    (ParsedRequest(min_p=1.5), "sampling.min_p"),
    (ParsedRequest(repetition_penalty=0.0), "sampling.repetition_penalty"),
    (ParsedRequest(repetition_penalty=1e-38), "sampling.repetition_penalty"),
    (ParsedRequest(repetition_penalty=11), "sampling.repetition_penalty"),
    (ParsedRequest(frequency_penalty=1e30), "sampling.frequency_penalty"),
    (ParsedRequest(presence_penalty=-math.inf), "sampling.presence_penalty"),
    (ParsedRequest(seed=-1), "sampling.seed"),
    (ParsedRequest(seed=2**64), "sampling.seed"),
    (ParsedRequest(n=0), "sampling.n"),
    (ParsedRequest(n=-1), "sampling.n"),
    (ParsedRequest(n=17), "sampling.n"),
    (ParsedRequest(n=2**32 - 1), "sampling.n"),
    (ParsedRequest(logit_bias={257: 1.0}), "sampling.logit_bias[257]"),
    (ParsedRequest(logit_bias={-1: 1.0}), "sampling.logit_bias[-1]"),
    (ParsedRequest(logit_bias={3: math.nan}), "sampling.logit_bias[3]"),
    (ParsedRequest(logit_bias=dict.fromkeys(range(1025), 1.0)), "sampling.logit_bias"),
    (ParsedRequest(max_tokens=-1, min_tokens=-1), "stop.min_tokens stop.max_tokens"),
    (ParsedRequest(max_tokens=2**32), "stop.max_tokens"),
    (ParsedRequest(max_tokens=2, min_tokens=3), "stop.min_tokens"),
    (ParsedRequest(stop=["a", ""]), "stop.stop[1]"),
    (ParsedRequest(stop=["x" * 257]), "stop.stop[0]"),
    (ParsedRequest(stop=["\ud800"]), "stop.stop[0]"),
    (ParsedRequest(stop=["a"] * 33), "stop.stop"),
    (ParsedRequest(stop=["a"] * 500_000), "stop.stop"),
    (ParsedRequest(stop_token_ids=[1, 300]), "stop.stop_token_ids[1]"),
    (ParsedRequest(stop_token_ids=[1] * 65), "stop.stop_token_ids"),
    (ParsedRequest(logprobs=21), "output.logprobs"),
    (ParsedRequest(logprobs=-1), "output.logprobs"),
    (ParsedRequest(prompt_logprobs=2**32 - 1), "output.prompt_logprobs"),
    (ParsedRequest(stream_interval=0), "output.stream_interval"),
    (ParsedRequest(prompt="x" * (128 * 1024 + 1)), "prompt"),
    (ParsedRequest(prompt="half a pair: \ud800"), "prompt"),
    (ParsedRequest(prompt=[0] * 65), "prompt"),
    (ParsedRequest(prompt=[0, 257]), "token_ids.ids[1]"),
    (ParsedRequest(prompt=[0, -1]), "token_ids.ids[1]"),
    (ParsedRequest(request_id="x" * 129), "request_id"),
    (ParsedRequest(request_id="two\nlines"), "request_id"),
    (ParsedRequest(request_id="naïve"), "request_id"),
    (ParsedRequest(priority=2**31), "priority"),
    (resume([1], index=2, n=2), "resume.index"),
    (resume([1], index=-1), "resume.index"),
    (resume([1, 400]), "resume.generated_token_ids[1]"),
    (resume([1] * 65), "resume.generated_token_ids"),
    (resume([1, 2, 3], max_tokens=2), "resume.generated_token_ids"),
    (resume([1], seed=None, temperature=0.5), "sampling.seed"),
]


@pytest.mark.parametrize(("parsed", "named"), REFUSED)
def test_refused(parsed: ParsedRequest, named: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check(parsed, CARD)
    assert " ".join(violation.field for violation in refusal.value.violations) == named


@pytest.mark.parametrize(
    ("parsed", "field"),
    [
        (ParsedRequest(prompt="a"), "prompt"),
        (ParsedRequest(stop=["a"]), "stop.stop"),
        (ParsedRequest(echo=True), "output.echo"),
    ],
)
def test_refused_without_tokenizer(parsed: ParsedRequest, field: str) -> None:
    check(parsed, CARD)
    with pytest.raises(InvalidRequest) as refusal:
        check(parsed, MUTE)
    assert [violation.field for violation in refusal.value.violations] == [field]


def test_mistakes_are_reported_together() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check(ParsedRequest(temperature=-1, top_p=2, n=0, stop=["a"] * 33), CARD)
    fields = [violation.field for violation in refusal.value.violations]
    assert fields == ["sampling.temperature", "sampling.top_p", "sampling.n", "stop.stop"]


def test_the_whole_range_is_told() -> None:
    parsed = ParsedRequest(
        temperature=-1, top_k=-1, top_p=0, min_p=2, repetition_penalty=0, frequency_penalty=11, seed=-1, n=0
    )
    with pytest.raises(InvalidRequest) as refusal:
        check(parsed, CARD)
    assert [violation.problem for violation in refusal.value.violations] == [
        "-1 is outside 0 (greedy) or 0.0001 to 100",
        "-1 is outside 0 to 4294967295",
        "0 is not above 0 and at most 1",
        "2 is outside 0 to 1",
        "0 is outside 0.01 to 10",
        "11 is outside -10 to 10",
        "-1 is outside 0 to 18446744073709551615",
        "0 sequences; ask for at least one",
    ]


def test_mistakes_are_not_reported_without_end() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check(ParsedRequest(logit_bias={1000 + i: 1.0 for i in range(1000)}), CARD)
    assert len(refusal.value.violations) == 8


def test_limits_themselves_are_accepted() -> None:
    check(ParsedRequest(temperature=0, top_p=1, min_p=1, repetition_penalty=10), CARD)
    check(ParsedRequest(temperature=1e-4, repetition_penalty=0.01), CARD)
    check(ParsedRequest(n=16, seed=2**64 - 1, top_k=2**32 - 1, priority=-(2**31)), CARD)
    check(ParsedRequest(stop=["x" * 256] * 32, stop_token_ids=[256] * 64, max_tokens=2**32 - 1), CARD)
    check(ParsedRequest(logprobs=20, prompt_logprobs=20, stream_interval=2**32 - 1), CARD)
    check(ParsedRequest(prompt="x" * 128 * 1024), CARD)


def test_defaults() -> None:
    made = to_request(ParsedRequest(), [1, 2], CARD, CALL)
    assert (made.id, made.caller, made.deadline_s, made.prompt_ids) == ("r/0", "somebody", 5.0, (1, 2))
    assert (made.num_sequences, made.resume_index, made.resume_ids, made.priority) == (1, None, (), 0)
    assert (made.sampling, made.output) == (SamplingParams(seed=99), OutputOptions())
    assert (made.stop, made.limited_by_context) == (StopConditions(max_tokens=62), True)


CHANGED = {
    "n": 2, "logit_bias": {5: 1.0}, "stop": ["x"], "stop_token_ids": [3], "resume": Resume(0, [5])
}  # fmt: skip
BY_TYPE = {bool: True, int: 3, float: 0.5, type(None): 3}


@pytest.mark.parametrize(
    "field", [f.name for f in fields(ParsedRequest) if f.name not in ("prompt", "request_id")]
)
def test_every_field_reaches_the_core(field: str) -> None:
    """One that is only checked would be ignored without a word."""
    plain = ParsedRequest()
    changed = replace(plain, **{field: CHANGED.get(field) or BY_TYPE[type(getattr(plain, field))]})
    assert to_request(changed, [1], CARD, CALL) != to_request(plain, [1], CARD, CALL)


@pytest.mark.parametrize(
    ("priority", "counted"), [(2**31 - 1, 10), (11, 10), (10, 10), (-10, -10), (-11, -10), (-(2**31), -10)]
)
def test_priorities_are_clamped(priority: int, counted: int) -> None:
    parsed = ParsedRequest(priority=priority)
    check(parsed, CARD)
    assert to_request(parsed, [1], CARD, CALL).priority == counted == priority_of(parsed)


def test_numbers_are_those_that_grpc_carries() -> None:
    made = to_request(ParsedRequest(top_p=0.9, logit_bias={7: 0.1}), [1], CARD, CALL)
    assert made.sampling.top_p == 0.8999999761581421
    assert made.sampling.logit_bias == ((7, 0.10000000149011612),)


@pytest.mark.parametrize(
    ("prompt", "parsed", "granted", "by_context"),
    [(10, 5, 5, False), (10, 54, 54, False), (10, 55, 54, True), (63, None, 1, True), (64, 0, 0, False)],
)
def test_max_tokens_and_context(prompt: int, parsed: int | None, granted: int, by_context: bool) -> None:
    made = to_request(ParsedRequest(max_tokens=parsed), [1] * prompt, CARD, CALL)
    assert (made.stop.max_tokens, made.limited_by_context) == (granted, by_context)


@pytest.mark.parametrize(
    ("prompt", "parsed", "problem"),
    [
        (65, 0, "65 tokens do not fit the context of 64"),
        (64, 1, "64 tokens do not fit the context of 64 together with a generated one"),
        (64, None, "64 tokens do not fit the context of 64 together with a generated one"),
        (1000, 5, "1000 tokens do not fit the context of 64"),
    ],
)
def test_prompt_beyond_context(prompt: int, parsed: int | None, problem: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        to_request(ParsedRequest(max_tokens=parsed), [1] * prompt, CARD, CALL)
    assert str(refusal.value) == f"prompt: {problem}"


def test_empty_prompt_starts_from_end_of_text() -> None:
    assert to_request(ParsedRequest(), [], CARD, CALL).prompt_ids == (EOS,)
    with pytest.raises(InvalidRequest, match="prompt: empty"):
        to_request(ParsedRequest(), [], replace(CARD, eos_id=None), CALL)


def test_resume_serves_one_sequence_and_no_prompt_again() -> None:
    made = to_request(resume([7, 8], index=1, n=3, echo=True, prompt_logprobs=1), [1], CARD, CALL)
    assert (made.num_sequences, made.resume_index, made.resume_ids) == (1, 1, (7, 8))
    assert (made.output.echo, made.output.prompt_logprobs) == (False, None)


def test_resume_before_the_first_token_serves_the_prompt() -> None:
    made = to_request(resume([], echo=True, prompt_logprobs=1), [1], CARD, CALL)
    assert (made.output.echo, made.output.prompt_logprobs, made.resume_index) == (True, 1, 0)


def test_resume_beyond_the_context() -> None:
    made = to_request(resume([1] * 54), [1] * 10, CARD, CALL)
    assert (len(made.resume_ids), made.stop.max_tokens, made.limited_by_context) == (54, 54, True)
    with pytest.raises(InvalidRequest, match="55 tokens do not fit the context of 64"):
        to_request(resume([1] * 55), [1] * 10, CARD, CALL)


def test_text_and_ids_outside_a_request() -> None:
    check_text("text", "x" * 128 * 1024, CARD)
    check_ids("ids", range(257), CARD)
    for refused in (
        lambda: check_text("text", "x" * (128 * 1024 + 1), CARD),
        lambda: check_text("text", "", MUTE),
        lambda: check_ids("ids", [257], CARD),
        lambda: check_ids("ids", [0] * (128 * 1024 + 1), CARD),
        lambda: check_ids("ids", [], MUTE),
    ):
        with pytest.raises(InvalidRequest):
            refused()


FIT = [("mine", True), ("two\nlines", False), ("naïve", False), ("x" * 129, False)]


@pytest.mark.parametrize(("name", "fit"), FIT)
def test_names_fit_for_logs(name: str, fit: bool) -> None:
    assert is_fit_for_logs(name, CARD) is fit
