"""/v1/chat/completions: templates, what they may not do, and answers as clients of chats read them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from ppserve.errors import ConfigError
from ppserve.head.api.chat_template import ChatTemplate
from ppserve.head.api.http.bodies import parse_body
from ppserve.head.api.http.chat import ChatBody
from ppserve.head.api.template_process import render
from tests.fake_engine import CARD, EOS, ByteCodec, drawn_token
from tests.head.api.http.asking import TEMPLATE, Served, raw, served_http

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


def called(arguments: object) -> dict[str, Any]:
    """An answer that called a function."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


UNSERVED: dict[str, object] = {
    "guided_whitespace_pattern": "x", "modalities": ["audio"],
    "audio": {"voice": "a"}, "web_search_options": {"a": 1}, "chat_template": "{{ messages }}", "echo": True,
}  # fmt: skip


async def test_a_chat_whole_and_streamed_for_openai_s_client(served: Served) -> None:
    from openai import AsyncOpenAI

    parsed: Any = {"model": "fake", "messages": HELLO, "seed": 3, "max_completion_tokens": 6, "n": 2}
    parsed |= {"logprobs": True, "top_logprobs": 2}
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none") as client:
        whole = await client.chat.completions.create(**parsed)
        chunks = [chunk async for chunk in await client.chat.completions.create(**parsed, stream=True)]
    assert (whole.object, chunks[0].object) == ("chat.completion", "chat.completion.chunk")
    for choice in whole.choices:
        ids = [drawn_token(served.engine.requests[0], choice.index, offset) for offset in range(6)]
        assert (choice.message.role, choice.message.content) == ("assistant", ByteCodec().decode(ids))
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(part.delta.content or "" for part in mine) == choice.message.content
        assert [part.delta.role for part in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert (mine[0].delta.content, mine[0].logprobs) == ("", None)
        assert choice.logprobs is not None
        content = choice.logprobs.content
        assert content is not None
        assert [bytes(entry.bytes or ()) for entry in content] == [bytes([token_id]) for token_id in ids]
        assert [len(entry.top_logprobs) for entry in content] == [2] * 6
        assert [e for part in mine if part.logprobs for e in part.logprobs.content or ()] == content
        assert (mine[-1].finish_reason, choice.finish_reason) == ("length", "length")


async def test_the_template_s_end_of_text_is_a_token_and_a_message_s_is_text(served: Served) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "<eos>"}]
    messages = [{"role": "user", "content": parts}]
    answer = await served.ask(CHAT, {"messages": messages, "max_tokens": 1})
    assert answer.status == 200, answer.body
    assert list(served.engine.requests[0].prompt_ids) == [*b"u:a\n<eos>", EOS, *b"\na:"]
    parsed = {"messages": HELLO, "max_tokens": 2, "return_token_ids": True, "n": 2}
    whole = (await served.ask(CHAT, parsed)).json
    first, *others = (await served.ask(CHAT, {**parsed, "stream": True})).events
    assert whole["prompt_token_ids"] == first["prompt_token_ids"] == [*b"u:hi", EOS, *b"\na:"]
    assert not any("prompt_token_ids" in part for part in (*others, *whole["choices"]))
    served.engine.requests[1:] = []
    await served.ask(CHAT, {"messages": HELLO, "max_tokens": 1, "add_generation_prompt": False})
    assert list(served.engine.requests[1].prompt_ids) == [*b"u:hi", EOS, *b"\n"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "messages"),
        ({"messages": [*HELLO, {"role": "robot", "content": "hi"}]}, "messages[1].role"),
        ({"messages": [*HELLO, {"role": "assistant", "content": None}]}, "messages[1].content"),
        *(
            (
                {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]},
                "messages[0].content[1]",
            )
            for part in (
                {"type": "image_url", "image_url": {"url": "data:"}},
                {"type": "input_audio"},
                {"type": "file"},
            )
        ),
        *(({"messages": HELLO, name: value}, name) for name, value in UNSERVED.items()),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}, "content": "a"}]}, "messages[0].audio"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [called([1])]}, "messages[0].tool_calls[0].function.arguments"),
        ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"messages": HELLO, "chat_template_kwargs": {"eos_token": ""}}, "chat_template_kwargs.eos_token"),
        (
            {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": HELLO, "top_p": 7}, "top_p"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"messages": HELLO, "max_tokens": -1}, "max_tokens"),
        ({"messages": HELLO, "max_completion_tokens": -1}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 64}], "max_tokens": 1}, "messages"),
    ],
)
async def test_a_refusal_names_the_field(served: Served, body: dict[str, Any], param: str) -> None:
    status, named, message = await served.refusal(CHAT, **body)
    assert (status, named) == (400, param), message
    assert served.engine.requests == []


@pytest.mark.slow
async def test_a_chat_whose_caller_has_gone_keeps_its_turn_while_it_is_rendered(tmp_path: Path) -> None:
    path = tmp_path / "endless.jinja"
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    path.write_text("{% if messages|length > 1 %}" + loops + "{% endif %}fine")
    async with served_http(chat_template=path) as served:
        others = renderers()
        _, caller = await asyncio.open_connection("127.0.0.1", served.port)
        caller.write(raw(CHAT, {"messages": HELLO * 2}))
        while not (begun := renderers() - others):
            await asyncio.sleep(0.01)
        caller.close()
        await caller.wait_closed()
        assert (await served.ask(CHAT, {"messages": HELLO}, x_request_timeout="0.5")).status == 504
        assert served.handler.template is not None
        assert await served.handler.template.render("another", HELLO, {}) == ["fine"]
        for renderer in begun:
            renderer.kill()
        assert (await served.ask(CHAT, {"messages": HELLO})).status == 200


def renderers() -> set[psutil.Process]:
    """The processes of this one that render chats."""
    return {each for each in psutil.Process().children() if render.__module__ in each.cmdline()}


async def test_a_role_is_one_of_openai_s_or_of_the_template_s(served: Served) -> None:
    messages = [{"role": role, "content": "a"} for role in ("developer", "function", "critic")]
    answer = await served.ask(CHAT, {"messages": messages, "max_tokens": 1})
    assert answer.status == 200, answer.body
    assert list(served.engine.requests[0].prompt_ids) == [*b"s:a", EOS, *b"\nf:a", EOS, *b"\n:a", EOS, *b"\na:"]


async def test_a_tokenizer_s_description_has_the_template(served: Served) -> None:
    assert (await served.ask("/tokenizer_info")).json["chat_template"] == TEMPLATE


async def test_what_a_body_says_reaches_the_template(tmp_path: Path) -> None:
    """What templates make of it: `test_chat_template`."""
    path = tmp_path / "chat.jinja"
    path.write_text("{{ mood }} {{ documents[0].title }} " + TEMPLATE)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Once upon"}]
    body = {"messages": messages, "max_tokens": 1, "documents": [{"title": "ä"}]}
    async with served_http(chat_template=path) as served:
        for continues, end in ((False, [EOS, *b"\na:"]), (True, [])):
            more = {"chat_template_kwargs": {"mood": "blue"}, "continue_final_message": continues}
            answer = await served.ask(CHAT, {**body, **more})
            assert answer.status == 200, answer.body
            said = [*"blue ä u:hi".encode(), EOS, *b"\na:Once upon", *end]
            assert list(served.engine.requests[-1].prompt_ids) == said


@pytest.mark.parametrize(
    "arguments",
    ['{"a": [1, "é"]}', '{"a": [1, "é"], "b": "c', {"a": [1, "é"]}, *("", None, "{", "[1]", "7", "null")],
)
def test_messages_are_those_that_transformers_and_vllm_give_to_templates(arguments: object) -> None:
    """Fields of any name; what is null is not there; arguments are objects; a reasoning has two names."""
    given: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "Ada", "": None, "given": 5},
        called(arguments) | {"reasoning": "b", "refusal": None, "custom": {"deep": [None, 5.0]}},
        {"role": "tool", "content": "c", "tool_call_id": "c"},
        {"role": "assistant", "content": "d", "tool_calls": [], "function_call": {"name": "g"}},
    ]
    body = parse_body(json.dumps({"messages": given}).encode(), ChatBody)
    assert not [*body.violations()]
    function = {"name": "f", "arguments": {"a": [1, "é"]} if "é" in str(arguments) else {}}
    older: dict[str, Any] = {"name": "g", "arguments": {}}
    messages = [message.for_template() for message in body.messages]
    assert messages == [
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "Ada", "given": 5},
        {
            "role": "assistant",
            "content": "",
            "custom": {"deep": [None, 5.0]},
            **dict.fromkeys(("reasoning", "reasoning_content", "thinking"), "b"),
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "c", "tool_call_id": "c"},
        {"role": "assistant", "content": "d", "tool_calls": [{"type": "function", "function": older}]},
    ]
    source = (
        "{% for m in messages %}{{ m | dictsort | tojson }}"
        "{% for c in m.tool_calls %}{{ c.function.arguments.a }}{% endfor %}{% endfor %}{{ tools is none }}"
    )
    shown = [message | {"content": "s"} for message in messages]
    ((expected,), _) = render_jinja_template([shown], chat_template=source)
    template = ChatTemplate(source, {}, {})
    assert asyncio.run(template.render("one", shown, {})) == [expected]
    template.close()


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{{ messages[0].content }}", "a\nb"),
        ("{% for m in messages %}{{ m['content'] | trim }}{% endfor %}", "a\nb"),
        ("{% for m in messages %}{% for part in m.content %}{{ part.text }}|{% endfor %}{% endfor %}", "a|b|"),
        ("{% for part in messages[0]['content'] | list %}{{ part['text'] }}|{% endfor %}", "a|b|"),
        (
            "{% macro f(content) %}{% for p in content[:9] %}{{ p.text }}|{% endfor %}{% endmacro %}"
            "{{ f(messages[0].content) }}",
            "a|b|",
        ),
    ],
)  # fmt: skip
def test_several_texts_are_lines_unless_the_template_takes_parts(source: str, shown: str) -> None:
    """vLLM tells these templates apart in the same way."""
    parts = [{"type": "text", "text": text} for text in "ab"]
    assert render(source, (), {}, {"messages": [{"role": "user", "content": parts}]}) == {"parts": [shown]}


async def test_parts_without_a_text_are_none(served: Served) -> None:
    parts = [{"type": "text", "text": None}, {"type": "text", "text": "a"}, {"type": "text"}]
    for content, text in ((parts, b"a"), (parts[::2], b"")):
        answer = await served.ask(CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 1})
        assert answer.status == 200, answer.body
        assert list(served.engine.requests[-1].prompt_ids) == [*b"u:", *text, EOS, *b"\na:"]


async def test_a_refusal_of_an_earlier_answer_is_its_text(served: Served) -> None:
    """Another model may have made it."""
    part = {"type": "refusal", "refusal": "no"}
    for said in ({"content": [part]}, {"content": None, "refusal": "no"}, {"content": "no", "refusal": None}):
        messages = [*HELLO, {"role": "assistant", **said}, *HELLO]
        answer = await served.ask(CHAT, {"messages": messages, "max_tokens": 1})
        assert answer.status == 200, answer.body
        assert list(served.engine.requests[-1].prompt_ids) == [
            *b"u:hi",
            EOS,
            *b"\na:no",
            EOS,
            *b"\nu:hi",
            EOS,
            *b"\na:",
        ]
    nothing = {
        "messages": [*HELLO, {"role": "assistant", "content": [{**part, "refusal": None}]}],
        "max_tokens": 1,
    }
    assert (await served.ask(CHAT, nothing)).status == 200


async def test_a_chat_as_a_whole_is_bounded(served: Served) -> None:
    """Each message by itself would not be too long."""
    half = CARD.limits.max_prompt_bytes // 2
    status, param, message = await served.refusal(CHAT, messages=[{"role": "user", "content": "x" * half}] * 2)
    assert (status, param) == (400, "messages")
    assert f"the limit is {CARD.limits.max_prompt_bytes}" in message


async def test_without_a_template_the_reason_is_told() -> None:
    async with served_http() as served:
        answer = await served.ask(CHAT, {"messages": HELLO})
        assert (answer.status, answer.json["error"]["code"]) == (400, "no_chat_template")
        assert "--chat-template" in answer.json["error"]["message"]
        assert (await served.ask("/tokenizer_info")).json["chat_template"] is None


@pytest.mark.parametrize(
    "content", [b"{% for %}", b"{{ " + b"(" * 5000, b"{% tool %}", b"\xff", b"x" * ((1 << 20) + 1), None]
)
def test_files_that_are_no_template(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "chat.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as refusal:
        ChatTemplate.read(path, {}, {})
    assert refusal.value.name == "--chat-template"
