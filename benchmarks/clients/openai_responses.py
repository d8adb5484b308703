"""OpenAI's client for responses, against the HTTP address given. Runs in the clients' environment."""

import sys
from typing import Literal

import openai
from pydantic import BaseModel


class Animal(BaseModel):
    kind: Literal["cat", "dog"]
    legs: Literal[4]


class Weather(BaseModel):
    """Tells it."""

    city: Literal["Bern", "Rome"]
    days: Literal[1, 2]


client = openai.OpenAI(base_url=f"http://{sys.argv[1]}/v1", api_key="none", max_retries=0)
asked = {"model": "tiny", "max_output_tokens": 30, "input": "Once upon a time", "extra_body": {"seed": 3}}
whole = client.responses.create(**asked, store=False)
text = whole.output_text
assert (bool(text), whole.status) == (True, "incomplete"), whole
with client.responses.stream(**asked) as stream:
    deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
assert "".join(deltas) == text
*_, last = client.responses.create(**asked, stream=True)
assert (last.response.output_text, last.response.usage) == (text, whole.usage)

history = [
    {"role": "developer", "content": "Tell stories."},
    {"role": "user", "content": "Once upon a time"},
    *whole.model_dump(exclude_none=True)["output"],
    {"role": "user", "content": "And then?"},
]
further = client.responses.create(**{**asked, "input": history}, instructions="Be kind.")
assert further.output_text
assert further.usage.input_tokens > whole.usage.total_tokens

roomy = {**asked, "max_output_tokens": 300}
parsed = client.responses.parse(**roomy, text_format=Animal)
assert (parsed.output_parsed.legs, parsed.status) == (4, "completed"), parsed
with client.responses.stream(**roomy, text_format=Animal) as stream:
    assert stream.get_final_response().output_parsed == parsed.output_parsed

tools = [{"type": "function", "name": "weather", "parameters": Weather.model_json_schema(), "strict": False}]
forced = {
    **roomy,
    "tools": [*tools, {"type": "web_search"}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}
called = client.responses.create(**forced, include=["reasoning.encrypted_content"])
(call,) = called.output
assert (call.type, call.name, called.status) == ("function_call", "weather", "completed"), called
weather = Weather.model_validate_json(call.arguments)
with client.responses.stream(**forced) as stream:
    pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
    final = stream.get_final_response().output[0]
assert ("".join(pieces), final.arguments, final.call_id) == (call.arguments, call.arguments, call.call_id), final
strict = client.responses.parse(**{**forced, "tools": [openai.pydantic_function_tool(Weather)]}).output[0]
assert isinstance(strict.parsed_arguments, Weather), strict
history = [
    {"role": "user", "content": "Once upon a time"},
    call.model_dump(exclude_none=True),
    {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
]
told = client.responses.create(**{**asked, "input": history, "tools": tools, "tool_choice": "none"})
assert told.output[0].type == "message", told

wrongs = {"previous_response_id": "resp_1", "top_p": 7, "input": []}
told = []
for name, wrong in wrongs.items():
    try:
        client.responses.create(**{**asked, name: wrong})
    except openai.BadRequestError as error:
        told.append(error.param)
assert told == [*wrongs], told
print(
    f"openai {openai.__version__}: created, streamed and parsed responses; {parsed.output_parsed!r}; "
    f"{weather!r} called whole, streamed and parsed; errors"
)
