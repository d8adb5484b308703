"""Two replicas behind one head: one is killed, one is restarted, and no stream notices but by a pause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import grpc
import pytest

from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.e2e.asking import Answer, ask, await_tokens
from tests.e2e.serving import Forked, Server, serving
from tests.e2e.test_losing_stages import long_requests

# So long that they are under way when a stage is killed, however slowly this process reads.
REQUESTS = long_requests(16, max_tokens=300)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(2, "--replicas", "2", by=Forked) as running:
        yield running


def asking(server: Server) -> tuple[threading.Thread, list[Answer]]:
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.extend(ask(server.grpc, REQUESTS, at_once=16)))
    thread.start()
    with grpc.insecure_channel(server.grpc) as channel:
        # Not before the streams are well under way: the witness has had many tokens by then.
        await_tokens(GenerationServiceStub(channel).Generate(long_requests(1)[0]))
    return thread, answers


@pytest.mark.timeout(240)
def test_streams_survive_the_kill_of_a_replica_and_the_restart_of_the_other(server: Server) -> None:
    undisturbed = ask(server.grpc, REQUESTS, at_once=16)
    assert {answer.end for answer in undisturbed} == {"MAX_TOKENS"}

    thread, answers = asking(server)
    os.kill(server.stage_pid(0), signal.SIGKILL)
    thread.join()
    assert answers == undisturbed
    assert "sequences go on at another replica" in server.log
    assert "replica 0 stage 0 died" in server.log

    restart = [sys.executable, "-m", "ppserve", "restart", "--target", server.grpc, "--replica"]
    # Waits until replica 0 has come back by itself, by restarting it again.
    subprocess.run([*restart, "0"], check=True)
    before = server.stage_pid(1)
    thread, answers = asking(server)
    subprocess.run([*restart, "1"], check=True)
    thread.join()
    assert answers == undisturbed
    assert server.stage_pid(1) != before
    refused = subprocess.run([*restart, "2"], capture_output=True, text=True, check=False)
    assert (refused.returncode, "there is no replica 2" in refused.stderr) == (1, True)
    with grpc.insecure_channel(server.grpc) as channel:
        topology = GenerationServiceStub(channel).GetTopology(pb.GetTopologyRequest())
    assert [replica.serves for replica in topology.replicas] == [True, True]
    assert [stage.replica for stage in topology.stages] == [0, 1]
