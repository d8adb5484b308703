"""Clients that read a stream by lines, unmodified: httpx, requests and huggingface_hub's InferenceClient.

    python line_readers.py HOST:PORT

They split lines at every character at which `str.splitlines` does. Each must see in a stream what the whole answer
has, where the text has all of these characters.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

import httpx
import huggingface_hub
import requests

ENDS = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
PROMPT = f"The lamp{ENDS}of"
# Those of U+2028 and U+0085. In the built-in model each byte is a token, and is made likelier than all others.
BYTES = (0xE2, 0x80, 0xA8, 0xC2, 0x85)


def text_of(lines: Iterable[str]) -> str:
    """What a stream's events hold. Raises ValueError for a line that is no event."""
    text = ""
    for line in filter(None, lines):
        name, _, content = line.partition(": ")
        if name != "data":
            raise ValueError(f"a line that is no event: {line!r}")
        if content != "[DONE]":
            text += json.loads(content)["choices"][0]["text"]
    return text


def show(url: str) -> str:
    body: dict[str, Any] = {"prompt": PROMPT, "echo": True, "max_tokens": 24, "seed": 3}
    completions = f"{url}/completions"
    whole = httpx.post(completions, json=body, timeout=60).json()["choices"][0]["text"]
    assert whole.startswith(PROMPT), whole
    body["stream"] = True
    with httpx.stream("POST", completions, json=body, timeout=60) as answer:
        assert text_of(answer.iter_lines()) == whole, "httpx"
    for decode in (True, False):
        with requests.post(completions, json=body, stream=True, timeout=60) as answer:
            lines = answer.iter_lines(decode_unicode=decode)
            assert text_of(line if decode else line.decode() for line in lines) == whole, "requests"
    return _show_hub(url)


def _show_hub(url: str) -> str:
    bias = dict.fromkeys(map(str, BYTES), 100)
    client = huggingface_hub.InferenceClient(base_url=url, api_key="none", timeout=60)
    messages = [{"role": "user", "content": "a lamp"}]
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": messages,
        "max_tokens": 400,
        "seed": 3,
        "extra_body": {"logit_bias": bias},
    }
    whole = client.chat_completion(**asked).choices[0].message.content
    assert set("\u2028\x85") <= set(whole or ""), "the answer has not the characters that this is about"
    chunks = client.chat_completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole, "huggingface_hub"
    names = f"httpx {httpx.__version__}, requests {requests.__version__}"
    return f"{names}, huggingface_hub {huggingface_hub.__version__} read whole lines"


if __name__ == "__main__":
    print(show(f"http://{sys.argv[1]}/v1"))
