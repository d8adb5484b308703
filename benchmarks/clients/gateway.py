"""smg in front of `vllm.grpc.engine`, with openai-python in front of that: the same texts as over our own HTTP.

smg gets the tokenizer and the chat template from the server (GetTokenizer).
"""

from __future__ import annotations

import re
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from benchmarks.local_server import running

READY_WITHIN_S = 60.0
# Without log-probabilities and lists of token ids: smg's own /v1/completions has neither.
PROMPTS = ("Once upon a time", "The little boat — of Ruth’s —", "A lamp\n\nin the 3rd window")
ASKED: tuple[dict[str, Any], ...] = (
    {"max_tokens": 30, "temperature": 0},
    {"max_tokens": 30, "seed": 7, "temperature": 0.8, "top_p": 0.9},
    {"max_tokens": 60, "seed": 8, "stop": [".", "\n"], "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"max_tokens": 20, "seed": 9, "n": 3},
)
TEMPLATE = "{% for part in messages %}{{ part.role }}: {{ part.content }}\n{% endfor %}assistant:"
MESSAGES: Any = [{"role": "user", "content": "Tell me of the old mill."}]
FREED_WITHIN_S = 10.0


def show(programs: Path) -> str:
    """Raises AssertionError where a text differs, or a caller who left is still served."""
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as file:
        file.write(TEMPLATE)
        file.flush()
        flags = ["--stages", "2", "--force-cpu", "--dtype", "float32", "--chat-template", file.name]
        return _compared(programs, flags)


def _compared(programs: Path, flags: list[str]) -> str:
    with running([*flags, "--vllm-grpc"]) as server:
        direct = _client(server.http)
        with _routed(programs, server.grpc) as address:
            routed = _client(address)
            count = 0
            for prompt in PROMPTS:
                for asked in ASKED:
                    expected = _whole(direct, prompt, asked)
                    assert _whole(routed, prompt, asked) == expected, (prompt, asked)
                    assert _streamed(routed, prompt, asked) == expected, (prompt, asked)
                    count += 2
            assert _chat(routed) == _chat(direct)
            freed_s = _leave(routed, server.metrics)
    return (
        f"{count} answers, whole and streamed, and a chat have the texts and ends that our own HTTP gives;"
        f" a caller who leaves is gone here {freed_s:.2f} s later"
    )


def _chat(client: openai.OpenAI) -> tuple[str | None, str]:
    choice = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=20, seed=4).choices[0]
    return choice.message.content, choice.finish_reason


def _leave(client: openai.OpenAI, metrics: str) -> float:
    """Seconds from leaving a stream until nothing runs any more."""
    stream = client.completions.create(
        model="tiny", prompt="Once", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert _num_running(metrics) == 1
    stream.close()
    begun_s = time.monotonic()
    while _num_running(metrics):
        assert time.monotonic() - begun_s < FREED_WITHIN_S, "what nobody reads is still computed"
        time.sleep(0.02)
    return time.monotonic() - begun_s


def _num_running(metrics: str) -> float:
    page = urllib.request.urlopen(f"http://{metrics}/metrics", timeout=10).read().decode()
    found = re.search(r"^ppserve_requests_running (\S+)$", page, re.MULTILINE)
    assert found is not None
    return float(found[1])


def _client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=60)


def _whole(client: openai.OpenAI, prompt: str, asked: dict[str, Any]) -> dict[int, tuple[str, str]]:
    choices = client.completions.create(model="tiny", prompt=prompt, **asked).choices
    return {choice.index: (choice.text, choice.finish_reason) for choice in choices}


def _streamed(client: openai.OpenAI, prompt: str, asked: dict[str, Any]) -> dict[int, tuple[str, str]]:
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for chunk in client.completions.create(model="tiny", prompt=prompt, stream=True, **asked):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    return {index: (text, ends[index]) for index, text in texts.items()}


@contextmanager
def _routed(programs: Path, grpc: str) -> Iterator[str]:
    """smg before the server; yields its HOST:PORT once it knows the model."""
    ports = _free_ports(2)
    command = [
        *(str(programs / "smg"), "launch", "--host", "127.0.0.1", "--port", str(ports[0])),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(ports[1])),
        *("--worker-urls", f"grpc://{grpc}", "--policy", "round_robin"),
    ]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            address = f"127.0.0.1:{ports[0]}"
            until_s = time.monotonic() + READY_WITHIN_S
            while not _serves(address):
                assert process.poll() is None, f"smg ended with {process.returncode}"
                assert time.monotonic() < until_s, "smg does not know the model"
                time.sleep(0.2)
            yield address
        finally:
            process.terminate()
            process.wait(30)


def _serves(address: str) -> bool:
    """Whether a request goes through: before that, the model or its tokenizer is not known there."""
    try:
        _client(address).completions.create(model="tiny", prompt="a", max_tokens=1)
    except openai.OpenAIError:
        return False
    return True


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports
