"""Streams that broke, continued: by hand from any point, by the client after its server was killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ppserve.client import CallFailed, Chunk, Client, RetryPolicy, completion_of
from tests.e2e.serving import Forked, Server, alive, serving, wait_until
from tests.ports import port_to_come_back_to

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def one_stage() -> Iterator[Server]:
    with serving(1, "--port", str(port_to_come_back_to()), by=Forked) as server:
        yield server


def test_a_client_goes_on_when_its_server_is_killed_and_comes_back(one_stage: Server) -> None:
    """With a stream that had begun, and with a call that had no token yet. The last test: it kills the server that
    the others use."""
    options = {"max_tokens": 200, "ignore_eos": True, "seed": 5, "n": 2, "logprobs": 1}
    failures: list[CallFailed] = []
    patient = RetryPolicy(first_pause_s=0.1, max_pause_s=0.5, max_attempts=300, on_retry=failures.append)
    with Client(one_stage.grpc, retry=patient) as client, ThreadPoolExecutor(1) as pool:
        whole = client.generate(PROMPT, **options)
        chunks: list[Chunk] = []
        stream = client.stream(PROMPT, **options)
        while sum(chunk.num_tokens for chunk in chunks) < 40:
            chunks.append(next(stream))
        os.kill(head := one_stage.head_pid(), signal.SIGKILL)
        wait_until(lambda: not alive(head))  # until then its port is taken
        unbegun = pool.submit(client.generate, PROMPT, **options)
        wait_until(lambda: len(failures) >= 3)
        with serving(1, "--port", one_stage.grpc.rpartition(":")[2], by=Forked):
            chunks += stream
            answers = [completion_of(chunks), unbegun.result(60)]
    for answer in answers:
        for one, other in zip(answer.sequences, whole.sequences, strict=True):
            assert (one.tokens, one.text, one.finish) == (other.tokens, other.text, other.finish)
