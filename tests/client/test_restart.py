"""The server's process is killed in mid-stream and started anew: the client continues the stream."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ppserve.client import CallFailed, Client, RetryPolicy
from tests.fake_engine import FakeEngine, served_in_thread

TESTS = Path(__file__).resolve().parent.parent

# A server that stands still after `halt` tokens of each stream, and never does with halt < 0.
SERVER = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from tests.fake_engine import FakeEngine, served
from ppserve.config import ServerSettings

async def main():
    engine = FakeEngine(halt_after=None if halt < 0 else halt)
    async with served(engine, ServerSettings(port=port)) as (_, target):
        print(target, flush=True)
        await asyncio.Event().wait()

port, halt = int(sys.argv[2]), int(sys.argv[3])
asyncio.run(main())
"""


def start(port: int, halt: int) -> tuple[subprocess.Popen[str], str]:
    """A server's process and its target."""
    command = [sys.executable, "-c", SERVER, str(TESTS), str(port), str(halt)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_a_stream_outlives_its_server() -> None:
    with served_in_thread(FakeEngine()) as target, Client(target) as client:
        whole = client.generate("hello", max_tokens=8, seed=5, n=2, logprobs=1)
    process, target = start(port=0, halt=3)
    chunks = []
    try:
        with Client(target, retry=RetryPolicy(first_pause_s=0.05, max_pause_s=0.2)) as client:
            for chunk in client.stream("hello", max_tokens=8, seed=5, n=2, logprobs=1):
                chunks.append(chunk)
                if sum(chunk.num_tokens for chunk in chunks) == 6:
                    process.kill()
                    process.communicate()
                    process, _ = start(int(target.rpartition(":")[2]), halt=-1)
    finally:
        process.kill()
        process.communicate()
    for sequence in whole.sequences:
        mine = [chunk for chunk in chunks if chunk.index == sequence.index]
        assert "".join(chunk.text for chunk in mine) == sequence.text
        assert tuple(token for chunk in mine for token in chunk.tokens) == sequence.tokens
        assert mine[-1].finish == sequence.finish
        assert mine[-1].usage == sequence.usage


def test_a_call_that_had_no_token_yet_waits_for_the_next_server() -> None:
    process, target = start(port=0, halt=-1)
    process.kill()
    process.communicate()
    port = int(target.rpartition(":")[2])
    failures: list[CallFailed] = []

    def at_failure(failure: CallFailed) -> None:
        nonlocal process
        failures.append(failure)
        if len(failures) == 20:  # more than a call was tried before
            process, _ = start(port, halt=-1)

    policy = RetryPolicy(first_pause_s=0.01, max_pause_s=0.05, on_retry=at_failure)
    try:
        with Client(target, retry=policy) as client:
            answer = client.generate("hello", max_tokens=4, seed=5, timeout_s=60)
    finally:
        process.kill()
        process.communicate()
    assert len(answer.text) == 4
    assert len(failures) >= 20
