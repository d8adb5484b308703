"""What /v1/completions answers, over a real server in this process, with an engine that has no model."""

from __future__ import annotations

import asyncio
import math
from itertools import accumulate
from types import SimpleNamespace

import pytest
from msgspec import structs

from ppserve.core.plan import TokenLogprobs
from ppserve.core.request import FinishReason, OutputOptions, SamplingParams, StopConditions
from ppserve.head.api.http.answers import LogprobWriter, cut
from ppserve.head.engine.streams import TokenOutput
from ppserve.head.limits import ALL
from tests.fake_engine import CARD, EOS, ByteCodec, drawn_token
from tests.head.api.http.asking import Served


def drawn(served: Served, place: int = 0, index: int = 0, count: int = 5) -> list[int]:
    """What the engine drew for its request number `place`."""
    return [drawn_token(served.engine.requests[place], index, offset) for offset in range(count)]


# ---- what comes back ----------------------------------------------------------------------------------


async def test_a_completion_is_what_openai_s_clients_expect(served: Served) -> None:
    answer = await served.complete(model="fake", prompt="hello", max_tokens=5, seed=7, request_id="mine")
    text = ByteCodec().decode(drawn(served))
    created = answer.pop("created")
    assert isinstance(created, int)
    assert answer == {
        "id": "cmpl-mine", "object": "text_completion", "model": "fake", "seed": 7,
        "system_fingerprint": CARD.fingerprint,
        "choices": [
            {"index": 0, "text": text, "logprobs": None, "finish_reason": "length", "stop_reason": None}
        ],
        "usage": {
            "prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }  # fmt: skip


async def test_events_say_what_a_whole_answer_says(served: Served) -> None:
    parsed = {"prompt": ["hello", "you"], "n": 2, "seed": 7, "logprobs": 2, "echo": True, "max_tokens": 12,
             "return_token_ids": True}  # fmt: skip
    whole = await served.complete(**parsed)
    events = await served.stream(**parsed, stream_options={"include_usage": True})
    assert [event["choices"] for event in events[-1:]] == [[]]
    assert events[-1]["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 3 + 3}, "of each prompt once"
    assert all(event["usage"] is None for event in events[:-1])
    assert {(event["id"], event["object"]) for event in events} == {(events[0]["id"], "text_completion")}
    assert {event["seed"] for event in events} == {7}
    for choice in whole["choices"]:
        mine = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [i for part in mine for i in part["token_ids"]] == choice["token_ids"]
        assert [part["prompt_token_ids"] for part in mine[:1]] == [choice["prompt_token_ids"]]
        assert not any("prompt_token_ids" in part for part in mine[1:])
        for name, values in choice["logprobs"].items():
            assert [value for part in mine for value in part["logprobs"][name]] == values, name
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + ["length"]
        assert len(mine) >= 4, "hardly a stream"


async def test_usage_on_every_event_or_on_none(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"prompt": "hello", "max_tokens": 4, "return_token_ids": True, "stream_options": options}
    *events, end = await served.stream(**asked)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == list(accumulate(len(event["choices"][0]["token_ids"]) for event in events))
    assert (len(events) > 1, counts[-1], end["usage"]["completion_tokens"]) == (True, 4, 4)
    events = await served.stream(prompt="hello", max_tokens=2)
    assert all(event["choices"] and "usage" not in event for event in events)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", [b"hello"]),
        ([104, 105], [b"hi"]),
        (["a", "b", "c"], [b"a", b"b", b"c"]),
        ([[104, 105], [106]], [b"hi", b"j"]),
        ("", [[EOS]]),
        (None, [[EOS]]),
    ],
)
async def test_every_form_of_prompt(served: Served, prompt: object, expected: list[object]) -> None:
    answer = await served.complete(prompt=prompt, max_tokens=1)
    assert [list(request.prompt_ids) for request in served.engine.requests] == [list(p) for p in expected]
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_choices_of_many_prompts_are_in_order_and_as_if_alone(served: Served) -> None:
    together = await served.complete(prompt=["one", "two", "one"], n=2, seed=5)
    texts = [choice["text"] for choice in together["choices"]]
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3, 4, 5]
    assert texts[:2] == texts[4:] != texts[2:4]
    alone = await served.complete(prompt="one", n=2, seed=5)
    assert [choice["text"] for choice in alone["choices"]] == texts[:2]
    assert served.engine.cancelled == set()


async def test_scoring_as_the_evaluation_harness_reads_it(served: Served) -> None:
    parsed = {"model": "fake", "prompt": [[104, 105, 106]], "temperature": 0, "max_tokens": 1, "logprobs": 1,
             "seed": 1234, "echo": True}  # fmt: skip
    answer = await served.complete(**parsed)
    (choice,) = answer["choices"]
    (token,) = drawn(served, count=1)
    assert choice["text"] == "hij" + chr(token)
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["h", "i", "j", chr(token)]
    assert logprobs["token_logprobs"] == [None, -105.0, -106.0, -0.5]
    assert logprobs["top_logprobs"] == [None, {"i": -105.0}, {"j": -106.0}, {chr(token): -0.5}]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    scored = await served.complete(prompt=[104, 105], max_tokens=0, logprobs=0, echo=True)
    assert scored["choices"][0]["logprobs"]["token_logprobs"] == [None, -105.0]
    assert scored["choices"][0]["text"] == "hi"
    # A prompt that ends inside a character is a text of its own.
    answer = await served.complete(prompt=[104, 0xC3], max_tokens=2, logprobs=0, echo=True)
    (choice,) = answer["choices"]
    assert choice["text"][:2] == "h\ufffd"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


def test_top_logprobs_hold_the_drawn_token_besides() -> None:
    words = {1: b"the", 2: b"\xe2\x80", 3: b"\xe2\x81", 4: "ä".encode()}
    codec = SimpleNamespace(token_bytes=words.__getitem__, text_bytes=words.__getitem__)
    writer = LogprobWriter(codec, as_ids=False)
    score = TokenLogprobs(-math.inf, ((2, -0.5), (3, -0.75)))
    lists = writer.completion((), [(1, score), (4, TokenLogprobs(-1.1)), (2, TokenLogprobs(-1.0))])
    assert lists["top_logprobs"][0] == {"bytes:\\xe2\\x80": -0.5, "bytes:\\xe2\\x81": -0.75, "the": -9999.0}
    assert lists["token_logprobs"][1] == lists["top_logprobs"][1]["ä"] == pytest.approx(-1.1)
    assert lists["text_offset"] == [0, 3, 4]
    named = LogprobWriter(codec, as_ids=True).completion((), [(1, score)])
    assert named["tokens"] == ["token_id:1"]
    assert list(named["top_logprobs"][0]) == ["token_id:2", "token_id:3", "token_id:1"]


async def test_a_prompt_s_scores_as_vllm_has_them(served: Served) -> None:
    parsed = {"prompt": [104, 105], "max_tokens": 1, "prompt_logprobs": 2, "seed": 1}
    (choice,) = (await served.complete(**parsed))["choices"]
    scored = {"logprob": -105.0, "rank": None, "decoded_token": "i"}
    assert (choice["prompt_logprobs"], choice["logprobs"]) == ([None, {"105": scored}], None)
    assert choice["text"] == chr(drawn(served)[0]), "the prompt is not echoed"
    named = await served.complete(**parsed, return_tokens_as_token_ids=True, n=2, echo=True, logprobs=0)
    for choice in named["choices"]:
        assert choice["prompt_logprobs"] == [None, {"105": scored | {"decoded_token": "token_id:105"}}]
    assert named["choices"][0]["logprobs"]["token_logprobs"] == [None, -105.0, -0.5]
    assert "prompt_logprobs" not in (await served.complete(prompt="a"))["choices"][0]
    asked = served.engine.requests
    assert [request.output.prompt_logprobs for request in asked] == [2, 2, None]


def test_a_prompt_s_likely_tokens_have_ranks_and_fields_their_own_numbers_of_them() -> None:
    codec = ByteCodec()
    first, second = (TokenLogprobs(-3.0, ((97, -1.0), (98, -2.0))), TokenLogprobs(-1.0, ((97, -1.0), (98, -2.0))))
    of_first, of_second = LogprobWriter(codec, as_ids=False).prompt([(99, first), (97, second)])
    assert of_first == {
        "99": {"logprob": -3.0, "rank": None, "decoded_token": "c"},
        "97": {"logprob": -1.0, "rank": 1, "decoded_token": "a"},
        "98": {"logprob": -2.0, "rank": 2, "decoded_token": "b"},
    }
    assert list(of_second or ()) == ["97", "98"]
    assert list(cut([(104, None), (99, first)], 1)) == [(104, None), (99, TokenLogprobs(-3.0, ((97, -1.0),)))]
    assert list(cut([(99, first)], ALL)) == [(99, first)]


async def test_the_likeliest_of_several_answers_are_chosen(served: Served) -> None:
    """The mean of their tokens' log-probabilities decides, for each prompt by itself."""
    served.engine.by_hand = True
    asking = asyncio.create_task(served.complete(prompt=["one", "two"], best_of=3, n=2, max_tokens=4))
    await served.engine.until(lambda engine: len(engine.sinks) == 2)
    assert [(of.num_sequences, of.output.logprobs) for of in served.engine.requests] == [(3, 0)] * 2
    end = FinishReason.MAX_TOKENS
    for sink, means in zip(served.engine.sinks.values(), ((-1.0, -3.0, -2.0), (-2.0, -2.0, -1.0)), strict=True):
        for index, mean in enumerate(means):
            scores = [TokenLogprobs(mean - 0.5), TokenLogprobs(mean + 0.5)]
            text = f"{index}"
            sink(
                [TokenOutput(index, 0, 65, text, scores[0]), TokenOutput(index, 1, 65, "", scores[1], finish=end)]
            )
    answer = await asking
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        *((0, "0"), (1, "2")),
        *((2, "2"), (3, "0")),
    ]
    assert answer["usage"]["completion_tokens"] == 12, "also those that are not returned"
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 4


async def test_special_tokens_are_shown_where_they_are_asked_for(served: Served) -> None:
    await served.complete(prompt="hello", skip_special_tokens=False)
    await served.complete(prompt="hello", skip_special_tokens=None)
    assert [request.output.skip_special_tokens for request in served.engine.requests] == [False, True]


ENDS = [
    (FinishReason.EOS, EOS, ("stop", None)),
    (FinishReason.STOP_TOKEN, 65, ("stop", 65)),
    (FinishReason.STOP_STRING, "\n\n", ("stop", "\n\n")),
    (FinishReason.CONTEXT_LENGTH, None, ("length", None)),
    (FinishReason.CANCELLED, None, ("abort", None)),
]
"""What ended a sequence, what it matched, and the words of OpenAI's and vLLM's interfaces for both."""


@pytest.mark.parametrize(("finish", "matched", "expected"), ENDS)
async def test_how_a_sequence_ended(
    served: Served, finish: FinishReason, matched: int | str | None, expected: object
) -> None:
    served.engine.by_hand = True
    asking = asyncio.create_task(served.complete(prompt="hello"))
    await served.engine.until(lambda engine: bool(engine.sinks))
    end = TokenOutput(0, 0, 65, "A", finish=finish, matched=matched)
    next(iter(served.engine.sinks.values()))([end])
    (choice,) = (await asking)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == expected


# ---- what is asked for --------------------------------------------------------------------------------


async def test_every_parameter_reaches_the_request(served: Served) -> None:
    await served.complete(
        prompt="hello", max_tokens=9, temperature=0.5, top_k=4, top_p=0.25, min_p=0.125, n=2, seed=3,
        repetition_penalty=1.5, frequency_penalty=-0.5, presence_penalty=0.5,
        logit_bias={"65": -100, "66": 2.5}, min_tokens=2, stop=["x", "\n\n"],
        stop_token_ids=[7, 5], ignore_eos=True, logprobs=3, echo=True,
        include_stop_str_in_output=True, return_token_ids=True, priority=-5, user="me", best_of=1, suffix="",
        stream_interval=3, skip_special_tokens=True, something_else={"deep": [1]},
        response_format={"type": "text"}, use_beam_search=False, bad_words=[], prompt_logprobs=None,
    )  # fmt: skip
    (request,) = served.engine.requests
    bias = ((65, -100.0), (66, 2.5))
    assert request.sampling == SamplingParams(3, 0.5, 4, 0.25, 0.125, 1.5, -0.5, 0.5, bias)
    assert request.stop == StopConditions(9, 2, ("x", "\n\n"), (5, 7), True, True)
    expected = OutputOptions(echo=True, logprobs=3, prompt_logprobs=3, token_ids=True)
    assert structs.replace(request.output, stream_interval=1) == expected
    assert (request.num_sequences, request.priority) == (2, 5), "the lowest comes first"
    await served.stream(prompt="hello", stream_interval=3, stop="one")
    assert served.engine.requests[1].output.stream_interval == 3
    assert served.engine.requests[1].stop.stop == ("one",)


async def test_defaults_are_openai_s_and_null_is_absent(served: Served) -> None:
    nulls = dict.fromkeys(["max_tokens", "temperature", "n", "stop", "logit_bias", "seed", "logprobs", "user"])
    for body in ({}, nulls):
        await served.complete(prompt="hello", **body)
    for request in served.engine.requests:
        assert request.stop == StopConditions(16)
        assert request.sampling == SamplingParams(request.sampling.seed)
    await served.complete(prompt="hello", top_k=-1)
    assert served.engine.requests[-1].sampling.top_k == 0


async def test_integers_may_have_a_point(served: Served) -> None:
    """Programs without integers write them so."""
    body = {"max_tokens": 5.0, "n": 2.0, "seed": 7.0, "logprobs": 1.0, "stop_token_ids": [3.0], "top_k": -1.0}
    await served.complete(prompt=[104.0, 105.0], **body, logit_bias={"65": 1.0})
    held = {"index": 1.0, "token_ids": [97.0]}
    await served.complete(prompt=[[104.0]], seed=1.0, n=2.0, max_tokens=2.0, resume=held)
    first, second = served.engine.requests
    assert (first.prompt_ids, first.num_sequences, first.sampling.seed) == ((104, 105), 2, 7)
    assert (first.stop, first.output.logprobs) == (StopConditions(5, stop_token_ids=(3,)), 1)
    assert (second.prompt_ids, second.resume_index, second.resume_ids) == ((104,), 1, (97,))


async def test_no_model_is_the_served_one(served: Served) -> None:
    for name in ("", None, "fake"):
        assert (await served.complete(prompt="a", model=name))["model"] == "fake"


async def test_ignored_fields_are_named_in_a_header(served: Served) -> None:
    body = {"prompt": "a", "max_token": 5, "user": "me", "nothing": None, "suffix": "", "na\u00efve\n": 1}
    for stream in (False, True):
        answer = await served.ask("/v1/completions", {**body, "stream": stream})
        assert answer.headers["x-ignored-fields"] == "max_token, user, na%C3%AFve%0A"
    wrong = await served.ask("/v1/completions", {**body, "temperatur": 0, "top_p": 7})
    assert (wrong.status, "temperatur" in wrong.headers["x-ignored-fields"]) == (400, True)
    options = {"include_usage": True, "include_usge": True}
    nested = await served.ask("/v1/completions", {"prompt": "a", "stream": True, "stream_options": options})
    assert nested.headers["x-ignored-fields"] == "stream_options.include_usge"
    unnamed = await served.ask("/v1/completions", {"prompt": "a", "user": "me", "": 1})
    assert (unnamed.status, unnamed.headers["x-ignored-fields"]) == (200, 'user, ""')
    many = await served.ask("/tokenize", {"prompt": "a"} | {"x" * place: 1 for place in range(1, 999)})
    assert many.headers["x-ignored-fields"] == ", ".join("x" * place for place in range(1, 17))
    assert "x-ignored-fields" not in (await served.ask("/v1/completions", {"prompt": "a", "stop": "x"})).headers
    assert "x-ignored-fields" not in (await served.ask("/version")).headers


async def test_the_seed_in_use_comes_back_and_is_one_for_all_prompts(served: Served) -> None:
    seeds = [(await served.complete(prompt=["a", "b"]))["seed"] for _ in range(3)]
    assert len(set(seeds)) == 3
    assert max(seeds) < 2**53
    assert [request.sampling.seed for request in served.engine.requests] == [s for s in seeds for _ in "ab"]
    signed = await served.complete(prompt="a", seed=-2)
    assert (signed["seed"], served.engine.requests[-1].sampling.seed) == (-2, 2**64 - 2)


async def test_a_stream_that_broke_is_resumed(served: Served) -> None:
    parsed = {"prompt": "hello", "max_tokens": 8, "return_token_ids": True, "echo": True, "n": 2}
    (first, *_) = events = await served.stream(**parsed)
    seed = first["seed"]
    mine = [c for event in events for c in event["choices"] if c["index"] == 1]
    held, rest = mine[:2], mine[2:]
    ids = [token_id for part in held for token_id in part["token_ids"]]
    more = await served.stream(**parsed, seed=seed, resume={"index": 1, "token_ids": ids})
    parts = [choice for event in more for choice in event["choices"]]
    assert {part["index"] for part in parts} == {1}
    assert "".join(part["text"] for part in parts) == "".join(part["text"] for part in rest)
    assert [i for part in parts for i in part["token_ids"]] == [i for part in rest for i in part["token_ids"]]
