"""instructor, against the HTTP address given: models of pydantic as answers. It runs apart."""

import sys
from importlib.metadata import version
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict


class Animal(BaseModel):
    """Describes one."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["cat", "dog"]
    legs: Literal[4]


MODES = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)
client = openai.OpenAI(base_url=f"http://{sys.argv[1]}/v1", api_key="none", max_retries=0)
asked = {
    "model": "tiny", "max_tokens": 400, "seed": 3, "max_retries": 0, "response_model": Animal,
    "messages": [{"role": "user", "content": "Once upon a time"}],
}  # fmt: skip
for mode in MODES:
    patched = instructor.from_openai(client, mode=mode)
    animal = patched.chat.completions.create(**asked)
    assert animal.legs == 4, animal
    *_, last = patched.chat.completions.create_partial(**asked)
    assert last.legs == 4, last
print(f"instructor {version('instructor')}: tools, strict tools and schemas, whole and in parts")
