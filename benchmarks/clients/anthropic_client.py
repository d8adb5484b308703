"""Anthropic's client, against the HTTP address given. Runs in the clients' environment."""

import asyncio
import sys

import anthropic

PROMPT = [{"role": "user", "content": "Once upon a time"}]
SYSTEM = "You tell stories about lamps and boats to people who listen. " * 8

client = anthropic.Anthropic(base_url=f"http://{sys.argv[1]}", api_key="none", max_retries=0)
asked = {"model": "tiny", "max_tokens": 30, "messages": PROMPT, "extra_body": {"seed": 3}}
whole = client.messages.create(**asked)
text = whole.content[0].text
assert (bool(text), whole.stop_reason) == (True, "max_tokens"), whole
with client.messages.stream(**asked) as stream:
    assert "".join(stream.text_stream) == text
    final = stream.get_final_message()
assert (final.content[0].text, final.stop_reason) == (text, whole.stop_reason)
assert final.usage.output_tokens == whole.usage.output_tokens == 30
events = [event.type for event in client.messages.create(**asked, stream=True)]
assert (events[0], events[-1]) == ("message_start", "message_stop"), events

word = text.split()[2]
cut = client.messages.create(**asked, stop_sequences=[word])
assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", word)
assert text.startswith(cut.content[0].text)

counted = client.messages.count_tokens(model="tiny", messages=PROMPT, system=SYSTEM)
cached = []
for number in range(2):
    line = f"x-anthropic-billing-header: cc_version=2.1.36.{number}; cch={number}{number};"
    system = [{"type": "text", "text": each, "cache_control": {"type": "ephemeral"}} for each in (line, SYSTEM)]
    usage = client.messages.create(**asked, system=system).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens, usage
    cached.append(usage.cache_read_input_tokens)
assert (cached[0], cached[1] > counted.input_tokens // 2) == (0, True), cached

tool = {
    "name": "weather",
    "description": "Tells it.",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Bern", "Rome"]},
            "days": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
forced = {
    **asked,
    "max_tokens": 200,
    "tools": [tool],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}
used = client.messages.create(**forced)
(use,) = used.content
assert (use.type, use.name, used.stop_reason) == ("tool_use", "weather", "tool_use"), used
assert (use.input["city"] in ("Bern", "Rome"), set(use.input["days"]) <= {1, 2}) == (True, True), use
with client.messages.stream(**forced) as stream:
    pieces = [event.partial_json for event in stream if event.type == "input_json"]
    final = stream.get_final_message()
assert (final.content, final.stop_reason, len(pieces) > 1) == (used.content, "tool_use", True), final
result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "rain"}]}
history = [*PROMPT, {"role": "assistant", "content": used.content}, {"role": "user", "content": [result]}]
told = client.beta.messages.create(
    **{**forced, "messages": history, "tool_choice": {"type": "none"}, "max_tokens": 5},
    betas=["interleaved-thinking-2025-05-14"],
    thinking={"type": "enabled", "budget_tokens": 1024},
)
assert told.content[0].type == "text", told
with_tools = client.messages.count_tokens(model="tiny", messages=history, tools=[tool])
without = client.messages.count_tokens(model="tiny", messages=history)
assert with_tools.input_tokens > without.input_tokens + 20

wrongs = (
    ({"model": "another"}, anthropic.NotFoundError),
    ({"extra_body": {"top_p": 7}}, anthropic.BadRequestError),
    ({"messages": []}, anthropic.BadRequestError),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, anthropic.BadRequestError),
)
told = []
for wrong, kind in wrongs:
    try:
        client.messages.create(**{**asked, **wrong})
    except kind as error:
        told.append(error.body["error"]["type"])
assert told == ["not_found_error", *["invalid_request_error"] * 3], told


async def ask() -> str:
    async with anthropic.AsyncAnthropic(base_url=f"http://{sys.argv[1]}", auth_token="none") as other:
        return (await other.messages.create(**asked)).content[0].text


assert asyncio.run(ask()) == text
print(
    f"anthropic {anthropic.__version__}: whole, streamed and asynchronous the same text; "
    f"{counted.input_tokens} tokens counted as used, {cached[1]} from the cache behind another header; "
    f"{use.name}({use.input}) used whole and streamed; errors"
)
