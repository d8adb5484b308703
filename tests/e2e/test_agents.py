"""Coding agents' sessions against a real server: the long prompt that their requests share is computed once.

The model has random weights and 32,768 positions, for the built-in one has 1,024.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agents import Recorded, claude_code, codex
from tests.e2e.serving import Server, serving
from tools.make_random_gpt2 import Shape, read_ranks, write_checkpoint, write_hugging_face_vocabulary

VOCABULARY = Path(__file__).parents[2] / "ppserve/assets/tiny/tokenizer.tiktoken"
TEMPLATE = Path(__file__).with_name("chat.jinja")
NUM_WORDS, NUM_TOKENS = 11_000, 20_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tmp_path_factory.mktemp("model") / "agent"
    ranks = read_ranks(VOCABULARY)
    write_hugging_face_vocabulary(ranks, model)
    write_checkpoint(model, Shape(2, 32, 2, 32_768, len(ranks) + 1))
    with serving(1, "--model", str(model), "--chat-template", str(TEMPLATE), "--max-num-seqs", "4") as server:
        yield server


def asked(server: Server, recorded: Recorded, num_tokens: int = 4) -> list[Any]:
    """The events of the answer. It is as long as told: these agents ask for 32,000 tokens, or for no limit."""
    limit = "max_output_tokens" if "input" in recorded.body else "max_tokens"
    connection = http.client.HTTPConnection(server.http, timeout=300)
    try:
        connection.request(
            "POST", recorded.path, json.dumps({**recorded.body, limit: num_tokens}), recorded.headers
        )
        answer = connection.getresponse()
        content = answer.read().decode()
        assert answer.status == 200, content
        return [
            json.loads(line.removeprefix("data: ")) for line in content.splitlines() if line.startswith("data")
        ]
    finally:
        connection.close()


def test_claude_code_s_next_session_finds_its_prompt_in_the_cache(server: Server) -> None:
    """Though the first line of the prompt differs."""
    read = []
    for number in (1, 2):
        *_, change, _ = asked(server, claude_code([], number, NUM_WORDS, "agent"))
        usage = change["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] > NUM_TOKENS
        read.append(usage["cache_read_input_tokens"])
    assert (read[0], read[1] > NUM_TOKENS) == (0, True)


def test_codex_s_next_request_finds_the_first_in_the_cache(server: Server) -> None:
    cached = []
    output: list[dict[str, Any]] = []
    for number in (1, 2):
        *_, end = asked(server, codex(output, number, NUM_WORDS, "agent"))
        usage = end["response"]["usage"]
        assert usage["input_tokens"] > NUM_TOKENS
        cached.append(usage["input_tokens_details"]["cached_tokens"])
        output = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And now?"}]}]
    assert (cached[0], cached[1] > NUM_TOKENS) == (0, True)
