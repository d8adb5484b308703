"""Real stages load other layers while streams run, and are killed while they do. No token changes."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import grpc
import pytest

from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.e2e import test_ledger as ledger
from tests.e2e.asking import Answer, answers_alone, requests_with_everything
from tests.e2e.serving import Forked, Server, serving
from tests.e2e.test_losing_stages import asking, long_requests
from tests.forking import RESHAPES

pytestmark = pytest.mark.timeout(240)

REQUESTS = [*long_requests(8), *requests_with_everything(8, seed=9)]
SPANS = {"4,4": ["0-3", "4-7"], "2.5,5.5": ["0-2a", "2m-7"], "8": ["0-7"], "6,2": ["0-5", "6-7"]}


@dataclass(frozen=True)
class Reshapable:
    """A server of two stages, whose layers can be divided anew."""

    server: Server
    socket: Path

    def ask(self, split: str) -> socket.socket:
        """Ask for other layers per stage. The answer comes once an epoch has formed with them."""
        asked = socket.socket(socket.AF_UNIX)
        asked.settimeout(60)
        asked.connect(str(self.socket))
        asked.sendall(f"{split}\n".encode())
        return asked

    def epoch(self) -> int:
        with grpc.insecure_channel(self.server.grpc) as channel:
            return GenerationServiceStub(channel).GetTopology(pb.GetTopologyRequest()).epoch

    def check_shape(self, split: str) -> None:
        """What callers and Prometheus are told of the stages is this shape."""
        with grpc.insecure_channel(self.server.grpc) as channel:
            topology = GenerationServiceStub(channel).GetTopology(pb.GetTopologyRequest())
        assert [stage.layers for stage in topology.stages] == SPANS[split]
        info = [sample.labels for sample in self.server.samples() if sample.name == "ppserve_stage_info"]
        assert [labels["layers"] for labels in info] == SPANS[split]


def answer_of(asked: socket.socket) -> str:
    with asked, asked.makefile() as lines:
        return lines.readline().strip()


@pytest.fixture(scope="module")
def reshapable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reshapable]:
    path = tmp_path_factory.mktemp("head") / "reshapes"
    flags = ("--layers", "4,4", "--log-level", "debug")
    with serving(2, *flags, by=Forked, env={RESHAPES: str(path)}) as server:
        yield Reshapable(server, path)


@pytest.fixture(scope="module")
def undisturbed() -> list[Answer]:
    return [sequences[0] for sequences in answers_alone(REQUESTS)]


def test_layers_are_divided_anew_under_streams(reshapable: Reshapable, undisturbed: list[Answer]) -> None:
    """One of the shapes has one stage, and the other process waits. The ledger has every second."""
    server = reshapable.server
    processes = [server.stage_pid(stage) for stage in (0, 1)]
    readings = [ledger.read(server)]
    for split in ("2.5,5.5", "8", "6,2"):
        before = reshapable.epoch()
        with asking(server, REQUESTS) as answers:
            assert int(answer_of(reshapable.ask(split))) == before + 1
            reshapable.check_shape(split)
            readings.append(ledger.read(server))
        assert answers == undisturbed
        readings.append(ledger.read(server))
    assert answer_of(reshapable.ask("4,3")).startswith("InvalidRequest: ")
    reshapable.check_shape("6,2")
    assert [server.stage_pid(stage) for stage in (0, 1)] == processes
    for earlier, later in pairwise(readings):
        ledger.check(earlier, later)


@pytest.mark.parametrize(
    ("stage", "split", "moment"),
    [
        (1, "2.5,5.5", "the layers are divided anew"),
        (0, "6,2", "stage 0 .*epoch {before}: left"),
        pytest.param(1, "8", "stage 1 .*epoch {before}: left", marks=pytest.mark.thorough),
        pytest.param(1, "4,4", "stage 1 .*epoch {following}: entering", marks=pytest.mark.thorough),
    ],
)
def test_a_stage_is_killed_while_the_layers_are_divided_anew(
    stage: int, split: str, moment: str, reshapable: Reshapable, undisturbed: list[Answer]
) -> None:
    """The first one is still in the epoch before, the second one may load; the last one enters the next epoch."""
    server, before, since = reshapable.server, reshapable.epoch(), len(reshapable.server.log)
    victim = server.stage_pid(stage)
    with asking(server, REQUESTS) as answers:
        if "anew" in moment:
            os.kill(victim, signal.SIGSTOP)  # it cannot leave its epoch
        asked = reshapable.ask(split)
        server.wait_for_line(moment.format(before=before, following=before + 1), since)
        os.kill(victim, signal.SIGKILL)
        assert int(answer_of(asked)) > before
        reshapable.check_shape(split)
    assert answers == undisturbed
    assert server.log.count(f"stage {stage} died", since) == 1
    assert server.stage_pid(stage) != victim
