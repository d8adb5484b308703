"""What a caller's fields become, and what is refused; by plain values, as every protocol hands them over."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError, replace
from typing import Any, cast

import pytest

from ppserve.answers import Options, read_options
from ppserve.core.request import OutputOptions, Request, SamplingParams, StopConditions
from ppserve.errors import MAX_VIOLATIONS, InvalidRequest
from ppserve.grammar.structured_output import StructuredOutput
from ppserve.head.api.call import Call
from ppserve.head.api.http.anthropic_messages import MessagesBody
from ppserve.head.api.http.asked import Resume
from ppserve.head.api.http.bodies import ChoicesBody, CompletionBody, GenerationBody
from ppserve.head.api.http.chat import ChatBody
from ppserve.head.api.http.openai_responses import ResponsesBody
from ppserve.head.api.requests import check_ids, encode, to_request
from ppserve.head.descriptions import ModelDescription
from ppserve.head.options import DEFAULTS, NAMES, GenerationOptions
from ppserve.library.pipeline import generation_options
from ppserve.tokenizer import no_tokenizer
from tests.fake_engine import CARD, EOS, ByteCodec

CALL = Call("r", seed=99, caller="somebody", deadline_s=5.0)
MUTE = replace(CARD, has_tokenizer=False)


def made(prompt_ids: Sequence[int] = (1,), description: ModelDescription = CARD, **given: Any) -> Request:
    return to_request(GenerationOptions(**given), prompt_ids, description, CALL)


def resume(ids: list[int], index: int = 0, **more: object) -> dict[str, Any]:
    return {"seed": 1, "resume_index": index, "resume_ids": ids, **more}


def fields_refused(**given: Any) -> list[str]:
    with pytest.raises(InvalidRequest) as refusal:
        made(**given)
    return [violation.field for violation in refusal.value.violations]


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"temperature": wrong}, "sampling.temperature") for wrong in (-0.5, math.nan, math.inf, 101, 1e300)),
    *(({"top_k": wrong}, "sampling.top_k") for wrong in (-1, 2**32)),
    *(({"top_p": wrong}, "sampling.top_p") for wrong in (-0.1, 1.01, math.nan)),
    *(({"min_p": wrong}, "sampling.min_p") for wrong in (-0.1, 1.5)),
    *(({"repetition_penalty": wrong}, "sampling.repetition_penalty") for wrong in (0.0, 1e-38, 11)),
    ({"frequency_penalty": 1e30}, "sampling.frequency_penalty"),
    ({"presence_penalty": -math.inf}, "sampling.presence_penalty"),
    *(({"seed": wrong}, "sampling.seed") for wrong in (-1, 2**64)),
    *(({"n": wrong}, "sampling.n") for wrong in (0, -1, 129, 2**32 - 1)),
    ({"temperature": -1, "top_p": 0}, "sampling.temperature"),
    ({"logit_bias": {257: 1.0}}, "sampling.logit_bias[257]"),
    ({"logit_bias": {-1: 1.0}}, "sampling.logit_bias[-1]"),
    ({"logit_bias": {3: math.nan}}, "sampling.logit_bias[3]"),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "sampling.logit_bias"),
    ({"max_tokens": -1, "min_tokens": -1}, "stop.min_tokens stop.max_tokens"),
    ({"max_tokens": 2**32}, "stop.max_tokens"),
    ({"max_tokens": 2, "min_tokens": 3}, "stop.min_tokens"),
    ({"stop": ["a", ""]}, "stop.stop[1]"),
    ({"stop": ["x" * 257]}, "stop.stop[0]"),
    ({"stop": ["\ud800"]}, "stop.stop[0]"),
    ({"stop": ["a"] * 33}, "stop.stop"),
    ({"stop": ["a"] * 500_000}, "stop.stop"),
    ({"stop_token_ids": [1, 300]}, "stop.stop_token_ids[1]"),
    ({"stop_token_ids": [1] * 65}, "stop.stop_token_ids"),
    *(({"logprobs": wrong}, "output.logprobs") for wrong in (21, -1, -2)),
    *(({"prompt_logprobs": wrong}, "output.prompt_logprobs") for wrong in (2**32 - 1, -1)),
    ({"allowed_token_ids": [1, 257]}, "sampling.allowed_token_ids[1]"),
    ({"bad_words": ["a", ""]}, "sampling.bad_words[1]"),
    ({"bad_words": ["x" * 257]}, "sampling.bad_words[0]"),
    ({"bad_words": ["a"] * 33}, "sampling.bad_words"),
    ({"stream_interval": 0}, "output.stream_interval"),
    ({"prompt_ids": [0] * 65}, "prompt"),
    *(({"prompt_ids": [0, wrong]}, "token_ids.ids[1]") for wrong in (257, -1)),
    (resume([1], index=2, n=2), "resume.index"),
    (resume([1], index=-1), "resume.index"),
    (resume([1, 400]), "resume.generated_token_ids[1]"),
    (resume([1] * 65), "resume.generated_token_ids"),
    (resume([1, 2, 3], max_tokens=2), "resume.generated_token_ids"),
    ({"resume_index": 0, "resume_ids": [1], "temperature": 0.5}, "sampling.seed"),
]


@pytest.mark.parametrize(("given", "named"), REFUSED)
def test_refused(given: dict[str, Any], named: str) -> None:
    assert " ".join(fields_refused(**given)) == named


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"stop": ["a"]}, "stop.stop"),
        ({"echo": True}, "output.echo"),
        ({"bad_words": ["a"]}, "sampling.bad_words"),
    ],
)
def test_refused_without_tokenizer(given: dict[str, Any], field: str) -> None:
    made(**given)
    assert fields_refused(description=MUTE, **given) == [field]


def test_mistakes_are_reported_together_with_the_ranges_but_not_without_end() -> None:
    wrong = {"temperature": -1, "top_k": -1, "top_p": 2, "min_p": 2, "repetition_penalty": 0, "seed": -1, "n": 0}
    with pytest.raises(InvalidRequest) as refusal:
        made(**wrong, frequency_penalty=11)
    assert [violation.problem for violation in refusal.value.violations] == [
        "-1 is outside 0 to 100",
        "-1 is outside 0 to 4294967295",
        "2 is outside 0 to 1",
        "2 is outside 0 to 1",
        "0 is outside 0.01 to 10",
        "11 is outside -10 to 10",
        "-1 is outside 0 to 18446744073709551615",
        "0 is outside 1 to 128",
    ]
    assert len(fields_refused(logit_bias={1000 + i: 1.0 for i in range(1000)})) == MAX_VIOLATIONS


def test_limits_themselves_are_accepted() -> None:
    """The request has them as they were given; only max_tokens is cut to what the context has room for."""
    least = made(temperature=1e-4, repetition_penalty=0.01).sampling
    assert (least.temperature, least.repetition_penalty) == pytest.approx((1e-4, 0.01))
    sampling = {"top_p": 1.0, "min_p": 1.0, "repetition_penalty": 10.0, "seed": 2**64 - 1, "top_k": 2**32 - 1}
    most = made(n=128, **sampling)
    assert (most.num_sequences, {name: getattr(most.sampling, name) for name in sampling}) == (128, sampling)
    stop = made(stop=["x" * 256] * 32, stop_token_ids=[256] * 64, max_tokens=2**32 - 1).stop
    assert (len(stop.stop), stop.stop_token_ids, stop.max_tokens) == (32, (256,), 63)
    output = made(logprobs=20, prompt_logprobs=20, stream_interval=2**32 - 1).output
    assert (output.logprobs, output.prompt_logprobs, output.stream_interval) == (20, 20, 2**32 - 1)


@pytest.mark.parametrize(
    "greedy",
    [{"temperature": 0}, {"temperature": 9e-5}, {"temperature": 1e-300}, {"top_p": 0},
     {"top_p": 1e-300, "temperature": 0.7}, {"temperature": -0.0, "top_p": 0}],
)  # fmt: skip
def test_words_for_the_most_likely_token(greedy: dict[str, float]) -> None:
    assert made(**greedy).sampling == SamplingParams(seed=99, temperature=0.0)
    held = {"resume_index": 0, "resume_ids": [1]}
    assert made(**held, **greedy).resume_ids == (1,), "it needs no seed"


def test_the_lowest_temperature_that_draws() -> None:
    assert made(temperature=1e-4).sampling.temperature == pytest.approx(1e-4)


def test_so_many_sequences_as_run_at_once() -> None:
    few = replace(CARD, limits=replace(CARD.limits, max_n=8))
    assert made(description=few, n=8).num_sequences == 8
    for wrong in (0, 9, 129):
        with pytest.raises(InvalidRequest, match=rf"{wrong} is outside 1 to 8, as many as .*\(--max-num-seqs\)$"):
            made(description=few, n=wrong)


def test_an_option_that_does_not_exist_is_not_taken() -> None:
    with pytest.raises(TypeError, match="temprature"):
        made(temprature=0.5)
    with pytest.raises(FrozenInstanceError):
        GenerationOptions().seed = 1  # type: ignore[misc]


def test_what_is_zero_or_false_is_said_and_what_is_none_is_absent() -> None:
    options = GenerationOptions(temperature=0, seed=0, echo=False, logprobs=0, max_tokens=None)
    assert options.said() == {"temperature": 0, "seed": 0, "echo": False, "logprobs": 0}
    assert made(seed=None, logprobs=None, n=None, resume_index=None, stop=None).sampling.seed == CALL.seed


def test_clients_and_doors_say_options_or_what_is_named_here() -> None:
    """A field of a misspelt name would be ignored without a word."""
    assert set(Options.__annotations__) - set(NAMES) == {"request_id", "timeout_s"}
    own = {"model", "stream", "stream_options", "request_id", "resume", "return_tokens_as_token_ids", "best_of"}
    own |= {"response_format", "structured_outputs", "guided_json", "guided_regex"}
    own |= {"guided_choice", "guided_grammar", "max_completion_tokens"}
    assert set(ChoicesBody.__struct_fields__) - set(NAMES) == own
    assert set(CompletionBody.__struct_fields__) - set(NAMES) == own | {"prompt"}
    chats = {
        "messages",
        "has_logprobs",
        "continue_final_message",
        "add_generation_prompt",
    }
    chats |= {"chat_template_kwargs", "documents", "reasoning_effort"}
    chats |= {"tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"}
    assert set(ChatBody.__struct_fields__) - set(NAMES) == own | chats
    shared = set(GenerationBody.__struct_fields__)
    forms = {"structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
    assert shared - set(NAMES) == {"model", "stream", "request_id"} | forms
    messages = {"messages", "system", "thinking", "output_config", "output_format", "tools", "tool_choice"}
    assert set(MessagesBody.__struct_fields__) - shared - set(NAMES) == messages
    responses = {"input", "instructions", "reasoning", "text", "include", "store", "echoed"}
    responses |= {"tools", "tool_choice", "parallel_tool_calls"}
    assert set(ResponsesBody.__struct_fields__) - shared - set(NAMES) == responses


VALUES: dict[str, Any] = {
    "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.5, "repetition_penalty": 1.5,
    "frequency_penalty": 0.5, "presence_penalty": 0.5, "seed": 5, "min_tokens": 1, "max_tokens": 7,
    "stream_interval": 3, "logprobs": 2, "prompt_logprobs": 2, "n": 2, "logit_bias": {5: 1.0}, "stop": ["x"],
    "stop_token_ids": [3], "ignore_eos": True, "include_stop": True, "echo": True, "token_ids": True,
    "timings": True, "priority": 2, "resume_index": 0, "resume_ids": [1], "truncate_prompt_tokens": 3,
    "allowed_token_ids": [5], "bad_words": ["x"], "skip_special_tokens": False,
    "add_special_tokens": False, "structured_output": StructuredOutput("regex", "a"),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_an_option_arrives_from_every_door_that_has_it(name: str) -> None:
    value = VALUES[name]
    doors = 0
    if name in Options.__annotations__:
        given = cast(Options, read_options({name: value}))
        assert list(generation_options(given).said()) == [name]
        doors += 1
    bodies: list[tuple[type[GenerationBody], dict[str, Any]]] = [
        (CompletionBody, {"prompt": "a"}),
        (ChatBody, {"messages": [], "has_logprobs": True}),
        (MessagesBody, {"messages": []}),
        (ResponsesBody, {"input": "a"}),
    ]
    for kind, always in bodies:
        if name in kind.__struct_fields__:
            bare, body = kind(**always, stream=True), kind(**always, stream=True, **{name: value})
            added = {
                key: held for key, held in body.options().said().items() if bare.options().said().get(key) != held
            }
            assert added == {name: value}
            doors += 1
    assert doors or name in ("resume_index", "resume_ids")
    resumed = CompletionBody(resume=Resume(token_ids=[1])).options()
    assert (resumed.resume_index, resumed.resume_ids) == (0, [1])


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_default_is_what_is_said_by_saying_nothing(name: str) -> None:
    default = {} if name == "logit_bias" else DEFAULTS[name]
    assert replace(made(**{name: default}), id="") == replace(made(), id="")


def test_defaults() -> None:
    request = made([1, 2])
    assert (request.id.partition("/")[0], made().id == request.id) == ("r", False)
    assert (request.caller, request.deadline_s, request.prompt_ids) == ("somebody", 5.0, (1, 2))
    assert (request.num_sequences, request.resume_index, request.resume_ids, request.priority) == (1, None, (), 0)
    assert (request.sampling, request.output) == (SamplingParams(seed=99), OutputOptions())
    assert (request.stop, request.length_end) == (StopConditions(max_tokens=62), "CONTEXT_LENGTH")


@pytest.mark.parametrize(
    ("priority", "counted"), [(2**70, -10), (11, -10), (10, -10), (3, -3), (-10, 10), (-11, 10), (-(2**31), 10)]
)
def test_priorities_are_clamped_and_the_lowest_is_the_first(priority: int, counted: int) -> None:
    assert made(priority=priority).priority == counted


def test_numbers_are_those_that_grpc_carries() -> None:
    sampling = made(top_p=0.9, logit_bias={7: 0.1}).sampling
    assert (sampling.top_p, sampling.logit_bias) == (0.8999999761581421, ((7, 0.10000000149011612),))


@pytest.mark.parametrize(
    ("prompt", "asked", "granted", "by_context"),
    [(10, 5, 5, False), (10, 54, 54, False), (10, 55, 54, True), (63, None, 1, True), (64, 0, 0, False)],
)
def test_max_tokens_and_context(prompt: int, asked: int | None, granted: int, by_context: bool) -> None:
    request = made([1] * prompt, **({} if asked is None else {"max_tokens": asked}))
    assert (request.stop.max_tokens, request.length_end == "CONTEXT_LENGTH") == (granted, by_context)


@pytest.mark.parametrize(
    ("prompt", "given", "problem"),
    [
        (65, {"max_tokens": 0}, "65 tokens do not fit the context of 64"),
        (64, {"max_tokens": 1}, "64 tokens do not fit the context of 64 together with a generated one"),
        (64, {}, "64 tokens do not fit the context of 64 together with a generated one"),
    ],
)
def test_prompt_beyond_context(prompt: int, given: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        made([1] * prompt, **given)
    assert str(refusal.value) == f"prompt: {problem}"


def test_a_prompt_that_is_truncated_keeps_its_last_tokens() -> None:
    for prompt, kept in ((range(70), range(60, 70)), (range(10), range(10)), (range(3), range(3))):
        assert made(list(prompt), truncate_prompt_tokens=10).prompt_ids == tuple(kept)


@pytest.mark.parametrize("wrong", [0, -2, 2**32])
def test_so_many_tokens_of_a_prompt_are_none(wrong: int) -> None:
    assert fields_refused(truncate_prompt_tokens=wrong) == ["truncate_prompt_tokens"]


@pytest.mark.parametrize(
    ("max_tokens", "num_kept"), [(None, 63), (0, 64), (1, 63), (60, 4), (63, 1), (64, 1), (2**32 - 1, 1)]
)
def test_a_prompt_may_be_truncated_to_what_fits_beside_the_answer(max_tokens: int | None, num_kept: int) -> None:
    prompt = [*range(200)]
    assert made(prompt, truncate_prompt_tokens=-1, max_tokens=max_tokens).prompt_ids == tuple(prompt[-num_kept:])
    assert made([7], truncate_prompt_tokens=-1, max_tokens=max_tokens).prompt_ids == (7,)


def test_the_whole_vocabulary_may_be_asked_for_where_the_limit_allows_it() -> None:
    size = CARD.architecture.vocab_size
    whole = replace(CARD, limits=replace(CARD.limits, max_logprobs=size))
    output = made(description=whole, logprobs=-1, prompt_logprobs=-1).output
    assert (output.logprobs, output.prompt_logprobs) == (size, size)
    assert made(description=whole, logprobs=3, prompt_logprobs=-1).output.logprobs == 3
    less = replace(CARD, limits=replace(CARD.limits, max_logprobs=size - 1))
    with pytest.raises(InvalidRequest, match="the limit is 256"):
        made(description=less, logprobs=-1)
    for limit, allowed in ((size, size), (size - 1, size - 1)):
        card = replace(CARD, limits=replace(CARD.limits, max_logprobs=limit))
        assert made(description=card, logprobs=allowed).output.logprobs == allowed


def test_empty_prompt_starts_from_end_of_text() -> None:
    assert made([]).prompt_ids == (EOS,)
    with pytest.raises(InvalidRequest, match="prompt: empty"):
        made([], replace(CARD, architecture=replace(CARD.architecture, eos_ids=())))


def test_resume_serves_one_sequence_and_its_prompt_only_before_the_first_token() -> None:
    request = made(**resume([7, 8], index=1, n=3, echo=True, prompt_logprobs=1))
    assert (request.num_sequences, request.resume_index, request.resume_ids) == (1, 1, (7, 8))
    assert (request.output.echo, request.output.prompt_logprobs) == (False, None)
    request = made(**resume([], echo=True, prompt_logprobs=1))
    assert (request.output.echo, request.output.prompt_logprobs, request.resume_index) == (True, 1, 0)


def test_resume_beyond_the_context() -> None:
    request = made([1] * 10, **resume([1] * 54))
    assert (len(request.resume_ids), request.stop.max_tokens, request.length_end) == (54, 54, "CONTEXT_LENGTH")
    with pytest.raises(InvalidRequest, match="55 tokens do not fit the context of 64"):
        made([1] * 10, **resume([1] * 55))


@pytest.mark.parametrize(
    "refused",
    [
        lambda: encode("text", ["x" * 128 * 1024, "<eos>"], ByteCodec(), CARD),
        lambda: encode("text", ["half a pair: \ud800"], ByteCodec(), CARD),
        lambda: encode("text", ["a"], no_tokenizer(), MUTE),
        lambda: check_ids("ids", [257], CARD),
        lambda: check_ids("ids", [0] * (128 * 1024 + 1), CARD),
        lambda: check_ids("ids", [], MUTE),
    ],
)
def test_text_and_ids_outside_a_request(refused: Callable[[], object]) -> None:
    assert encode("text", ["x" * (128 * 1024 - 6), "<eos>", "y"], ByteCodec(), CARD)[-2:] == [EOS, ord("y")]
    check_ids("ids", range(257), CARD)
    with pytest.raises(InvalidRequest):
        refused()
