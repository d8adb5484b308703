"""What /v1/completions refuses, and how its answers end before their time."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
import zlib
from typing import Any

import pytest

from ppserve.core.request import FinishReason
from ppserve.errors import Overloaded, RequestFailed, StagesLost
from ppserve.head.engine.streams import TokenOutput
from tests.fake_engine import CARD
from tests.head.api.http.asking import Served, raw

# Of OpenAI's and vLLM's interfaces: each of them would change the answer.
UNSERVED: dict[str, object] = {
    "suffix": "end", "use_beam_search": True, "logprob_token_ids": [65],
    "guided_whitespace_pattern": "x", "logits_processors": ["x"],
    "repetition_detection": {"max_pattern_size": 3}, "kv_transfer_params": {"do_remote_decode": True},
    "vllm_xargs": {"x": 1}, "prompt_embeds": "AAAA",
}  # fmt: skip


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_p": 7}, "top_p"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": 99}, "logprobs"),
        ({"logprobs": 99, "echo": True}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"max_tokens": 1e300}, "max_tokens"),
        ({"stream": 1.0}, "stream"),
        ({"stop": ["x"] * 33}, "stop"),
        ({"stop": ["", "x"]}, "stop[0]"),
        ({"stop_token_ids": [999]}, "stop_token_ids[0]"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999": 1}}, "logit_bias[999]"),
        ({"logit_bias": {"05": 1}}, "logit_bias"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias"),
        ({"prompt": [104, 999]}, "prompt[1]"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": "x" * 65}, "prompt"),
        ({"prompt": 5}, "prompt"),
        *(({name: value}, name) for name, value in UNSERVED.items()),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 2, "seed": 1, "resume": {"token_ids": []}}, "best_of"),
        *(({"logprobs": wrong}, "logprobs") for wrong in (-2, -1, 21)),
        ({"prompt_logprobs": 99}, "prompt_logprobs"),
        ({"prompt_logprobs": 2, "stream": True}, "prompt_logprobs"),
        ({"allowed_token_ids": [999]}, "allowed_token_ids[0]"),
        ({"bad_words": ["", "x"]}, "bad_words[0]"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        *(({"request_id": wrong}, "request_id") for wrong in ("two\nlines", "naïve", "x" * 129, 5)),
        ({"resume": {"token_ids": [1, 2]}}, "seed"),
        ({"resume": {"index": 5, "token_ids": []}}, "resume.index"),
        ({"prompt": ["hello", "you"], "seed": 1, "resume": {"token_ids": [97]}}, "resume"),
        ({"resume": {"index": 0}}, "resume.token_ids"),
        ({"resume": {"generated_token_ids": [1], "token_ids": [1]}}, "resume.generated_token_ids"),
        ({"seed": 2**64}, "seed"),
        *(({"truncate_prompt_tokens": wrong}, "truncate_prompt_tokens") for wrong in (0, -2, 2**32)),
        ({"truncate_prompt_tokens": 2, "echo": True}, "truncate_prompt_tokens"),
        ({"seed": -(2**63) - 1}, "seed"),
    ],
)
async def test_a_refusal_names_the_field_as_callers_know_it(
    served: Served, body: dict[str, Any], param: str
) -> None:
    status, named, message = await served.refusal(**{"prompt": "hello", **body})
    assert (status, named) == (400, param), message
    assert "sampling." not in message
    assert served.engine.requests == []
    assert served.counted == {("/v1/completions", 400): 1}


LARGEST = {"n": (1, 128), "seed": (-(2**63), 2**64 - 1), "top_k": (-1, 2**32 - 1), "max_tokens": (0, 2**32 - 1),
           "min_tokens": (0, 2**32 - 1), "stream_interval": (1, 2**32 - 1)}  # fmt: skip


@pytest.mark.parametrize("name", LARGEST)
async def test_the_limits_of_a_whole_number_are_those_that_are_named(served: Served, name: str) -> None:
    least, most = LARGEST[name]
    for wrong in (least - 1, most + 1):
        message = (await served.refusal(prompt="hello", stream=True, **{name: wrong}))[2]
        assert f"{wrong} is outside {least} to {most}" in message
    for right in (least, most):
        fitting = {"max_tokens": right} if name == "min_tokens" else {}
        answer = await served.ask("/v1/completions", {"prompt": "hello", **fitting, name: right})
        assert answer.status == 200, answer.json


@pytest.mark.parametrize(
    ("prompts", "param"),
    [
        ([[104], [104, 999]], "prompt[1][1]"),
        (["a", "b", "x" * 65], "prompt[2]"),
        ([[104], [104] * 64, [104]], "prompt[1]"),
    ],
)
async def test_a_refusal_says_which_of_several_prompts(served: Served, prompts: list[object], param: str) -> None:
    status, named, message = await served.refusal(prompt=prompts)
    assert (status, named) == (400, param), message
    assert (await served.refusal(prompt=prompts, n=129))[1] == "n"


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("completions", {"max_tokens": "ten"}, "max_tokens: must be a whole number, not a text"),
        ("completions", {"temperature": "0.5"}, "temperature: must be a number, not a text"),
        ("completions", {"logprobs": True}, "logprobs: must be a whole number, not true or false"),
        ("completions", {"prompt": {}}, "prompt: must be a text or a list, not an object"),
        ("completions", {"stop": [1]}, "stop[0]: must be a text, not a whole number"),
        ("completions", {"response_format": {"type": "json_schema", "schema": {}}},
         "response_format.schema: no field is called so here"),
        ("completions", {"messages": [{"role": "user", "content": "hi"}]},
         "messages: a chat is asked for at /v1/chat/completions"),
        ("chat/completions", {"prompt": "hi"}, "messages: missing"),
        ("chat/completions", {"messages": "hi"}, "messages: must be a list, not a text"),
        ("chat/completions", {"messages": [{"content": "hi"}]}, "messages[0].role: missing"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_told_in_words(served: Served, path: str, body: dict[str, Any], told: str) -> None:
    status, param, message = await served.refusal(f"/v1/{path}", **body)
    assert (status, message) == (400, told)
    assert param == told.partition(": ")[0]


async def test_both_a_prompt_and_messages_are_a_prompt(served: Served) -> None:
    answer = await served.ask("/v1/completions", {"prompt": "a", "messages": [{}], "max_tokens": 1})
    assert (answer.status, answer.headers["x-ignored-fields"]) == (200, "messages")


@pytest.mark.parametrize(
    ("method", "path", "told"),
    [
        (
            "POST",
            "/v1/completion",
            "there is no path '/v1/completion' on this server; did you mean /v1/completions?",
        ),
        ("POST", "/completions", "there is no path '/completions' on this server; did you mean /v1/completions?"),
        ("GET", "/nowhere", "there is no path '/nowhere' on this server; GET /openapi.json lists the paths"),
        ("GET", "/metrics", "the metrics have a port of their own (--metrics-port, 9400 by default)"),
        ("GET", "/v1/completions", "/v1/completions takes POST, not GET"),
        ("POST", "/v1/models/tiny", "/v1/models/tiny takes GET, not POST"),
    ],
)
async def test_another_path_is_answered_with_what_was_meant(
    served: Served, method: str, path: str, told: str
) -> None:
    answer = await served.ask(path, {} if method == "POST" else None, method)
    assert (answer.status, answer.json["error"]["message"]) == (405 if "takes" in told else 404, told)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "is empty"),
        (b"[]", "must be an object, not a list"),
        (b"{", "truncated"),
        (b'{"prompt": "a",}', "trailing comma in object (byte 15)"),
        (b"\xff", "(byte 0)"),
        (b'{"prompt": "\xff"}', "decode byte 0xff"),
        (b'{"prompt": "\\ud800"}', "not JSON"),
        (b"[" * 100_000, "must be an object, not a list"),
        (b'{"x": ' + b"[" * 100_000, "recursion depth"),
    ],
)
async def test_bodies_that_are_not_json(served: Served, body: bytes, why: str) -> None:
    error = (await served.ask("/v1/completions", body)).json["error"]
    assert error["param"] == "body"
    assert why in error["message"]


@pytest.mark.parametrize("depth", [400, 900, 1100])
async def test_what_is_nested_deeply_is_read_or_refused(served: Served, depth: int) -> None:
    body = b'{"max_tokens": 1, "x": ' + b"[" * depth + b"]" * depth + b"}"
    assert (await served.ask("/v1/completions", body)).status in (200, 400)


async def test_bodies_in_codings(served: Served) -> None:
    whole = json.dumps({"prompt": "hello", "max_tokens": 2, "seed": 1}).encode()
    plain = await served.ask("/v1/completions", whole)
    for coding in ("gzip", "GZIP", "x-gzip"):
        answer = await served.ask("/v1/completions", gzip.compress(whole), content_encoding=coding)
        assert answer.status == 200, answer.body
        assert answer.json["choices"] == plain.json["choices"]
    for coding in ("identity", ""):
        assert (await served.ask("/v1/completions", whole, content_encoding=coding)).status == 200
    served.engine.requests.clear()
    for coding in ("deflate", "br", "zstd", "gzip, gzip", "nonsense"):
        answer = await served.ask("/v1/completions", zlib.compress(whole), content_encoding=coding)
        assert (answer.status, answer.json["error"]["code"]) == (415, "unsupported_coding")
        assert answer.headers["accept-encoding"] == "gzip"
    zipped = gzip.compress(whole)
    members = gzip.compress(whole[:9]) + gzip.compress(
        whole[9:]
    )  # a body of many is read more slowly than it is sent
    for wrong in (whole, members, zipped[:-4], zipped[:-8] + bytes(8), zipped + b"more", b"\x1f\x8b"):
        answer = await served.ask("/v1/completions", wrong, content_encoding="gzip")
        assert (answer.status, answer.json["error"]["param"]) == (400, "body")
    bomb = gzip.compress(bytes(8 * CARD.limits.max_body_bytes))
    assert len(bomb) < CARD.limits.max_body_bytes / 8
    assert (await served.ask("/v1/completions", bomb, content_encoding="gzip")).status == 413
    assert served.engine.requests == []


async def test_a_full_queue_says_when_to_come_back(served: Served) -> None:
    served.engine.refusal = Overloaded("the queue is full", 1.5)
    for stream in (False, True):
        answer = await served.ask("/v1/completions", {"prompt": ["a", "b"], "stream": stream})
        assert answer.status == 429
        assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("2", "1500")
        assert answer.json["error"]["code"] == "queue_full"


@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (StagesLost("stage 1 is gone"), 503, {"retry-after": "5"}),
        (RequestFailed("logits are not finite"), 500, {"x-should-retry": "false"}),
    ],
)
async def test_an_error_after_some_tokens(
    served: Served, error: Exception, status: int, headers: dict[str, str]
) -> None:
    served.engine.break_error = error
    served.engine.break_after = 3
    for prompt in ("hello", ["hello", "you"]):
        served.engine.num_breaks = 2
        events = await served.stream(prompt=prompt, max_tokens=6)
        assert events[-1]["error"]["message"] == str(error)
        assert 3 <= len("".join(c["text"] for event in events[:-1] for c in event["choices"])) <= 6
    served.engine.num_breaks = 1
    answers = [await served.ask("/v1/completions", {"prompt": "hello"})]
    # Before a stream's first token its error is a status as well, so that clients repeat what can be repeated.
    served.engine.break_after = 0
    for prompt in ("hello", ["hello", "you"]):
        served.engine.num_breaks = 2
        answers.append(await served.ask("/v1/completions", {"prompt": prompt, "stream": True}))
    assert [answer.status for answer in answers] == [status] * 3
    assert all(headers.items() <= answer.headers.items() for answer in answers)


@pytest.mark.parametrize("pushed", [[], [TokenOutput(0, 0, 65, "A")]])
async def test_an_end_at_the_deadline_is_an_error(served: Served, pushed: list[TokenOutput]) -> None:
    """The status says so until something was sent; afterwards an event does, after all that was made in time."""
    served.engine.by_hand = True
    for stream in (False, True):
        body = {"prompt": "hello", "n": 2, "stream": stream}
        asking = asyncio.create_task(served.ask("/v1/completions", body))
        await served.engine.until(lambda engine: bool(engine.sinks))
        _, sink = served.engine.sinks.popitem()
        sink(pushed)
        sink([TokenOutput(index, len(pushed), finish=FinishReason.DEADLINE) for index in (0, 1)])
        answer = await asking
        if stream and pushed:
            assert [choice["text"] for event in answer.events[:-1] for choice in event["choices"]] == ["A"]
            assert answer.events[-1]["error"]["code"] == "deadline_exceeded"
        else:
            assert (answer.status, answer.json["error"]["code"]) == (504, "deadline_exceeded")
            assert answer.headers["x-should-retry"] == "false"


async def test_unforeseen_errors_tell_callers_nothing(served: Served) -> None:
    served.engine.refusal = ValueError("secret")
    answer = await served.ask("/v1/completions", {"prompt": "hello"}, x_request_id="mine")
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert answer.headers["x-request-id"] == "mine"


async def test_the_caller_s_time_limit(served: Served) -> None:
    before_s = time.monotonic()
    answer = await served.ask("/v1/completions", {"prompt": "a"}, x_request_timeout="60")
    assert answer.status == 200
    (deadline_s,) = (request.deadline_s for request in served.engine.requests)
    assert deadline_s is not None
    assert before_s + 59 < deadline_s < time.monotonic() + 60
    for wrong in ("soon", "-1", "0", "nan", "inf", "1e9"):
        answer = await served.ask("/v1/completions", {"prompt": "a"}, x_request_timeout=wrong)
        assert (answer.status, answer.json["error"]["param"]) == (400, "x-request-timeout")
    for right in ("5.", "1e1", "+.5"):
        assert (await served.ask("/v1/models", x_request_timeout=right)).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_ends_at_its_caller_s_time_limit(served: Served, stream: bool) -> None:
    """It ends then even if its body is not there yet."""
    served.engine.by_hand = True
    answer = await served.ask("/v1/completions", {"prompt": "a", "stream": stream}, x_request_timeout="0.3")
    assert (answer.status, answer.headers["x-should-retry"]) == (504, "false")
    assert answer.json["error"]["code"] == "deadline_exceeded"
    (request,) = served.engine.requests
    await served.engine.until(lambda engine: request.id in engine.cancelled)
    for path in ("/v1/chat/completions", "/tokenize"):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(raw(path, {"prompt": "a"}, "x-request-timeout: 0.1")[:-1])
        assert b" 504 " in await reader.readline()
        writer.close()
