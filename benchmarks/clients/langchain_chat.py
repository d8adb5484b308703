"""LangChain's class for chats, against the HTTP address given: tools, and structured output. It runs in an
environment of its own."""

import sys
from importlib.metadata import version
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict


class Animal(BaseModel):
    """Describes one."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["cat", "dog"]
    legs: Literal[4]


@tool
def weather(city: Literal["Bern", "Rome"], days: Literal[1, 2]) -> str:
    """Tells it."""
    return f"{days} days of sun in {city}"


llm = ChatOpenAI(base_url=f"http://{sys.argv[1]}/v1", api_key="none", model="tiny", max_tokens=300, seed=3)
history = [HumanMessage("Once upon a time")]
forced = llm.bind_tools([weather], tool_choice="any", parallel_tool_calls=False)
answer = forced.invoke(history)
(call,) = answer.tool_calls
pieces = [*forced.stream(history)]
whole = pieces[0]
for piece in pieces[1:]:
    whole += piece
assert whole.tool_calls == answer.tool_calls, (whole.tool_calls, answer.tool_calls)
result = weather.invoke(call)
assert isinstance(result, ToolMessage)
assert llm.bind_tools([weather]).invoke([*history, answer, result]).usage_metadata["output_tokens"] > 0
for method in ("json_schema", "function_calling"):
    structured = llm.with_structured_output(Animal, method=method)
    animal = structured.invoke(history)
    assert animal.legs == 4, animal
    assert [*structured.stream(history)][-1] == animal
print(
    f"langchain-openai {version('langchain-openai')}: tools, whole and streamed, their results, structured output"
)
