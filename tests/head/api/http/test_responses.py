"""/v1/responses: with OpenAI's own client, and what it leaves out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from ppserve.core.request import FinishReason
from ppserve.errors import RequestFailed
from ppserve.head.api.http.bodies import parse_body
from ppserve.head.api.http.openai_responses import ResponsesBody
from ppserve.head.engine.streams import TokenOutput
from tests.fake_engine import EOS, ByteCodec, drawn_token
from tests.head.api.http.asking import Answer, Served, served_http

RESPONSES = "/v1/responses"
ASKED: dict[str, Any] = {"model": "fake", "input": "hi", "max_output_tokens": 6, "extra_body": {"seed": 3}}


@pytest.fixture
async def client(served: Served) -> AsyncIterator[AsyncOpenAI]:
    url = f"http://127.0.0.1:{served.port}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def ask(served: Served, **body: object) -> Answer:
    answer = await served.ask(RESPONSES, {"input": "hi", "max_output_tokens": 6, "seed": 3, **body})
    assert answer.status == 200, answer.body
    return answer


async def test_a_response_whole(served: Served, client: AsyncOpenAI) -> None:
    response = await client.responses.create(**ASKED, instructions="be", temperature=0.5, metadata={"a": "b"})
    (request,) = served.engine.requests
    assert list(request.prompt_ids) == [*b"s:be", EOS, *b"\nu:hi", EOS, *b"\na:"]
    assert (request.sampling.temperature, request.sampling.seed, request.stop.max_tokens) == (0.5, 3, 6)
    text = ByteCodec().decode([drawn_token(request, 0, offset) for offset in range(6)])
    assert response.output_text == text
    (message,) = response.output
    assert (message.type, message.status) == ("message", "incomplete")
    assert (response.object, response.model, response.status) == ("response", "fake", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.temperature, response.instructions, response.metadata) == (0.5, "be", {"a": "b"})
    assert (response.max_output_tokens, response.tools, response.tool_choice) == (6, [], "auto")
    told = response.model_dump()
    assert (told["store"], told["seed"], told["previous_response_id"], response.error) == (False, 3, None, None)
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (14, 6, 20)
    assert response.usage.input_tokens_details.cached_tokens == 3


async def test_a_response_as_events(served: Served) -> None:
    whole = (await ask(served)).json
    events = (await ask(served, stream=True)).named_events
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    names = [name.removeprefix("response.") for name, _ in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    data = [event for _, event in events]
    last = data[-1]["response"]
    (item,) = last["output"]
    assert {(event["output_index"], event["content_index"], event["item_id"]) for event in data[3:-2]} == {
        (0, 0, item["id"])
    }
    assert data[2]["item"] == {**item, "status": "in_progress", "content": []}
    assert data[3]["part"] == {**item["content"][0], "text": ""}
    deltas = [event["delta"] for event in data[4:-4]]
    assert len(deltas) > 1
    assert "".join(deltas) == data[-4]["text"] == item["content"][0]["text"]
    assert (data[-3]["part"], data[-2]["item"]) == (item["content"][0], item)
    for begun in data[:2]:
        not_yet = {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        assert begun["response"] == {**last, **not_yet}
    own = {name: (whole[name], last[name]) for name in ("id", "created_at")}
    item["id"] = whole["output"][0]["id"]
    assert last | {name: first for name, (first, _) in own.items()} == whole


async def test_openai_s_stream_helper(served: Served, client: AsyncOpenAI) -> None:
    whole = await client.responses.create(**ASKED)
    async with client.responses.stream(**ASKED) as stream:
        texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
    assert len(texts) > 1
    assert "".join(texts) == whole.output_text


class Pair(BaseModel):
    a: int
    b: str


async def end(served: Served, asked: asyncio.Task[Any], text: str, reason: FinishReason) -> Any:
    """What a call returns whose answer is this text."""
    await served.engine.until(lambda engine: bool(engine.requests))
    request = served.engine.requests[-1]
    served.engine.sinks[request.id]([TokenOutput(0, 0, 1, text, finish=reason)])
    return await asked


async def test_a_response_that_is_parsed(served: Served, client: AsyncOpenAI) -> None:
    served.engine.by_hand = True
    asked = asyncio.create_task(client.responses.parse(**ASKED, text_format=Pair))
    response = await end(served, asked, '{"a": 5, "b": "c"}', FinishReason.EOS)
    assert response.output_parsed == Pair(a=5, b="c")
    assert (response.status, response.incomplete_details) == ("completed", None)
    assert served.engine.filters[-1] is not None


@pytest.mark.parametrize(
    ("reason", "status", "event"),
    [
        (FinishReason.EOS, "completed", "completed"),
        (FinishReason.CONTEXT_LENGTH, "incomplete", "incomplete"),
        (FinishReason.CANCELLED, "cancelled", "incomplete"),
    ],
)
async def test_an_end_without_a_text(served: Served, reason: FinishReason, status: str, event: str) -> None:
    served.engine.by_hand = True
    answer = await end(served, asyncio.create_task(ask(served, stream=True)), "", reason)
    assert [name for name, _ in answer.named_events][2:] == [f"response.{event}"]
    response = answer.named_events[-1][1]["response"]
    assert (response["status"], response["output"]) == (status, [])


async def test_an_error_within_a_stream_is_a_failed_response(served: Served) -> None:
    served.engine.break_error, served.engine.break_after, served.engine.num_breaks = RequestFailed("no luck"), 2, 1
    name, event = (await ask(served, stream=True)).named_events[-1]
    assert (name, event["response"]["status"]) == ("response.failed", "failed")
    assert event["response"]["error"] == {"code": "server_error", "message": "no luck"}
    assert len(event["response"]["output"][0]["content"][0]["text"]) == 2


def body_of(**body: object) -> ResponsesBody:
    return parse_body(json.dumps(body).encode(), ResponsesBody)


def test_items_become_the_messages_that_templates_know() -> None:
    def said(role: str, kind: str, *texts: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}

    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": '{"at": 5.0}'}
    items = [
        said("developer", "input_text", "be brief"),
        said("user", "input_text", "one"),
        {"role": "user", "content": "two"},
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "short"}],
         "content": [{"type": "reasoning_text", "text": "hm"}], "encrypted_content": None},
        said("assistant", "output_text", "three"),
        call,
        {**call, "call_id": "c2", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "a"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "four"}]},
        said("user", "input_text", "five", "six"),
        {"type": "reasoning", "summary": [], "encrypted_content": "?"},
    ]  # fmt: skip

    def called(call_id: str, **arguments: object) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}

    def parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    messages = body_of(instructions="be kind", input=items).prompts[0].messages
    assert [message.shown for message in messages] == [
        {"role": "system", "content": parts("be kind", "be brief")},
        {"role": "user", "content": parts("one", "two")},
        {
            "role": "assistant",
            "content": "three",
            "reasoning_content": "hm",
            "tool_calls": [called("c1", at=5.0), called("c2")],
        },
        {"role": "tool", "content": "a", "tool_call_id": "c1"},
        {"role": "tool", "content": "b", "tool_call_id": "c2"},
        {"role": "assistant", "content": "four", "reasoning_content": "short"},
        {"role": "user", "content": parts("five", "six")},
    ]
    assert [message.place for message in messages][:4] == ["instructions", "input[1]", "input[3]", "input[7]"]


@pytest.mark.parametrize(
    ("reasoning", "variables"),
    [
        (None, {}),
        ({"summary": "auto"}, {}),
        ({"effort": ""}, {}),
        ({"effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}),
        ({"effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
    ],
)
def test_an_effort_is_a_variable_of_templates(reasoning: object, variables: dict[str, Any]) -> None:
    assert body_of(input="hi", reasoning=reasoning).prompts[0].variables == variables


def item(**fields: object) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "hi"}, fields]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        (item(role="robot", content="a"), "input[1].role"),
        (item(content="a"), "input[1].role"),
        (item(role="user"), "input[1].content"),
        (item(role="user", content=[{"type": "input_image", "image_url": "a"}]), "input[1].content[0]"),
        (item(role="user", content=[{"type": "input_image", "refusal": "a"}]), "input[1].content[0]"),
        (item(role="assistant", content=[{"type": "refusal", "text": "a"}]), "input[1].content[0]"),
        (item(type="item_reference", id="a"), "input[1].type"),
        (item(type="function_call", call_id="a", name="b"), "input[1].arguments"),
        (item(type="function_call_output", call_id="a"), "input[1].output"),
        (item(type="function_call_output", call_id="a", output="b"), "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"background": True}, "background"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"top_p": 7}, "top_p"),
        ({"input": "x" * 64, "max_output_tokens": 1}, "input"),
        ({"input": "x" * (200 << 10)}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ],
)
async def test_a_refusal_names_the_field(served: Served, body: dict[str, Any], param: str) -> None:
    status, named, message = await served.refusal(RESPONSES, **{"input": "hi", **body})
    assert (status, named) == (400, param), message
    assert served.engine.requests == []


@pytest.mark.parametrize("store", [True, False, None])
async def test_nothing_is_stored_and_the_answer_says_so(served: Served, store: bool | None) -> None:
    answer = await ask(served, store=store, include=["reasoning.encrypted_content"], truncation="auto")
    assert answer.json["store"] is False
    assert answer.json["truncation"] == "auto"
    missing = await served.ask(f"{RESPONSES}/{answer.json['id']}")
    assert missing.status == 404


async def test_without_a_template_the_reason_is_told() -> None:
    async with served_http() as served:
        status, _, message = await served.refusal(RESPONSES, input="hi")
    assert (status, "--chat-template" in message) == (400, True)
