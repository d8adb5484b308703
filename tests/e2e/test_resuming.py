"""Streams that broke, continued by `ppserve chat` and by the client after a stage or the server was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ppserve.answers import Completion
from ppserve.client import CallFailed, Chunk, Client, RetryPolicy, completion_of
from tests.e2e.serving import Forked, Server, alive, serving, wait_until
from tests.ports import port_to_come_back_to

TEMPLATE = str(Path(__file__).with_name("chat.jinja"))
PROMPT = "Once upon a time"
OPTIONS = {"max_tokens": 200, "ignore_eos": True, "seed": 5, "n": 2, "logprobs": 1}


def parts_of(completion: Completion) -> list[tuple[object, ...]]:
    """What must be the same of every sequence, however often its stream broke."""
    return [(each.tokens, each.text, each.finish) for each in completion.sequences]


def ask(http: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ppserve", "chat", "--temperature", "0", "--url", f"http://{http}"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write("Once upon a time there was a dragon.\n")
    process.stdin.close()
    return process


def read(process: subprocess.Popen[str], count: int = -1) -> str:
    assert process.stdout is not None
    return process.stdout.read(count)


def kill_head(server: Server) -> None:
    """Kill it, and wait until it is gone: its ports are taken until then."""
    os.kill(head := server.head_pid(), signal.SIGKILL)
    wait_until(lambda: not alive(head))


@pytest.mark.timeout(200)
def test_answers_outlive_a_stage_and_their_server() -> None:
    """These are the answers of a chat, and of a client a stream that had begun and a call that had no token
    yet."""
    ports = "--http-port", str(port_to_come_back_to()), "--port", str(port_to_come_back_to())
    flags = (*ports, "--chat-template", TEMPLATE)
    with serving(2, *flags, by=Forked) as server:
        with ask(server.http) as process:
            whole = read(process)
        assert len(whole) > 80
        with ask(server.http) as process:
            begun = read(process, 10)
            os.kill(server.stage_pid(1), signal.SIGKILL)
            assert begun + read(process) == whole
        assert process.returncode == 0
        with ask(server.http) as process:
            begun = read(process, 10)
            kill_head(server)
            with serving(2, *flags, by=Forked) as second:
                assert begun + read(process) == whole
                check_client(second, flags)
        assert process.returncode == 0


def check_client(server: Server, flags: tuple[str, ...]) -> None:
    failures: list[CallFailed] = []
    patient = RetryPolicy(first_pause_s=0.1, max_pause_s=0.5, max_attempts=300, on_retry=failures.append)
    with Client(server.grpc, retry=patient) as client, ThreadPoolExecutor(1) as pool:
        whole = client.complete(PROMPT, **OPTIONS)
        chunks: list[Chunk] = []
        stream = client.stream(PROMPT, **OPTIONS)
        while sum(chunk.num_tokens for chunk in chunks) < 40:
            chunks.append(next(stream))
        kill_head(server)
        unbegun = pool.submit(client.complete, PROMPT, **OPTIONS)
        wait_until(lambda: len(failures) >= 3)
        with serving(2, *flags, by=Forked):
            chunks += stream
            answers = [completion_of(chunks), unbegun.result(60)]
    assert [parts_of(answer) for answer in answers] == [parts_of(whole)] * 2
