"""OpenAI's client, then LiteLLM's proxy, then the HTTP address given. It runs in an environment of its own."""

import json
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path

import openai

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"const": 4}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "describe", "description": "Does it.", "parameters": SCHEMA}}
FORM = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
ASKED = {"max_tokens": 300, "seed": 3, "messages": [{"role": "user", "content": "Once upon a time"}]}
WITHIN_S = 300
KEY = "sk-" + secrets.token_hex(16)

with closing(socket.socket()) as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
with tempfile.TemporaryDirectory() as folder:
    config = Path(folder) / "config.yaml"
    served = {"model": "openai/tiny", "api_base": f"http://{sys.argv[1]}/v1", "api_key": "none"}
    models = [{"model_name": "small", "litellm_params": served}]
    config.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": KEY}}))
    command = [str(Path(sys.executable).parent / "litellm"), "--config", str(config)]
    proxy = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=sys.stderr, stderr=sys.stderr, cwd=folder
    )
    try:
        direct, routed = (
            openai.OpenAI(base_url=f"http://{address}/v1", api_key=KEY, max_retries=0, timeout=60)
            for address in (sys.argv[1], f"127.0.0.1:{port}")
        )
        until_s = time.monotonic() + WITHIN_S
        while True:
            with suppress(openai.APIConnectionError):
                routed.models.list()
                break
            assert proxy.poll() is None, "the proxy ended"
            assert time.monotonic() < until_s, "the proxy does not answer"
            time.sleep(0.5)
        for more in ({}, {"response_format": FORM}, {"tools": [TOOL], "tool_choice": "required"}):
            asked = {**ASKED, **more}
            expected = direct.chat.completions.create(model="tiny", **asked).choices[0]
            found = routed.chat.completions.create(model="small", **asked).choices[0]
            assert found.finish_reason == expected.finish_reason
            assert found.message.content == expected.message.content
            calls, wanted = found.message.tool_calls or [], expected.message.tool_calls or []
            assert [each.function for each in calls] == [each.function for each in wanted], calls
            stream = routed.chat.completions.create(model="small", stream=True, **asked)
            text = "".join(c.delta.content or "" for piece in stream for c in piece.choices)
            assert text == (expected.message.content or "")
    finally:
        proxy.terminate()
        proxy.wait(30)
print(f"litellm {version('litellm')}: chats, a schema's answer and calls through its proxy are those without it")
