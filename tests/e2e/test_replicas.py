"""Two replicas behind one head: killed or restarted, idle or not, no stream notices but by a pause."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest

from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.e2e.asking import Answer, ask, await_tokens
from tests.e2e.serving import Forked, Server, serving, wait_until
from tests.e2e.test_losing_stages import asking, long_requests

pytestmark = pytest.mark.timeout(240)

# So long that they are under way when a stage is killed, however slowly this process reads.
REQUESTS = long_requests(16, max_tokens=300)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(2, "--replicas", "2", by=Forked) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[Answer]:
    """What all requests are to bring."""
    answers = ask(server.grpc, REQUESTS, at_once=16)
    assert {answer.end for answer in answers} == {"MAX_TOKENS"}
    return answers


def test_streams_survive_the_kill_of_a_replica_and_the_restart_of_the_other(
    server: Server, undisturbed: list[Answer]
) -> None:
    with asking(server, REQUESTS) as answers:
        os.kill(server.stage_pid(0), signal.SIGKILL)
    assert answers == undisturbed
    assert "sequences go back to the queue" in server.log
    assert "replica 0 stage 0 died" in server.log

    restart = [sys.executable, "-m", "ppserve", "restart", "--target", server.grpc, "--replica"]
    # Waits until replica 0 has come back by itself, by restarting it again.
    subprocess.run([*restart, "0"], check=True)
    before = server.stage_pid(1)
    with asking(server, REQUESTS) as answers:
        subprocess.run([*restart, "1"], check=True)
    assert answers == undisturbed
    assert server.stage_pid(1) != before
    refused = subprocess.run([*restart, "2"], capture_output=True, text=True, check=False)
    assert (refused.returncode, "there is no replica 2" in refused.stderr) == (1, True)
    assert [stage.replica for stage in topology_of(server).stages] == [0, 1]
    assert serves(server) == [True, True]


def test_an_idle_replica_comes_and_goes_while_the_other_serves(server: Server, undisturbed: list[Answer]) -> None:
    """The one that does not compute the only stream is killed, twice."""
    since = len(server.log)
    for _ in range(2):
        with grpc.insecure_channel(server.grpc) as channel:
            witness = GenerationServiceStub(channel).Generate(long_requests(1, max_tokens=900)[0])
            await_tokens(witness)
            (idle,) = wait_until(lambda: idle_replicas(server), lambda: server.log)
            killed = server.stage_pid(idle)
            os.kill(killed, signal.SIGKILL)
            await_serving(server, [replica != idle for replica in (0, 1)])
            await_tokens(witness)
            witness.cancel()
        assert ask(server.grpc, REQUESTS[:1], at_once=1) == undisturbed[:1]
        await_serving(server, [True, True])
        assert server.stage_pid(idle) != killed
    assert len(re.findall(r"replica \d stage 0 died", server.log[since:])) == 2
    assert "sequences go back to the queue" not in server.log[since:], "it was idle"
    assert server.process.poll() is None


def topology_of(server: Server) -> pb.GetTopologyResponse:
    with grpc.insecure_channel(server.grpc) as channel:
        return GenerationServiceStub(channel).GetTopology(pb.GetTopologyRequest())


def serves(server: Server) -> list[bool]:
    return [replica.serves for replica in topology_of(server).replicas]


def await_serving(server: Server, expected: list[bool]) -> None:
    wait_until(lambda: serves(server) == expected, lambda: server.log)


def idle_replicas(server: Server) -> list[int]:
    return [replica.replica for replica in topology_of(server).replicas if not replica.running]
