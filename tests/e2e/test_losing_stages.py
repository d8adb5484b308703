"""Stages die, freeze, or do not come back, while streams run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

import ppserve
from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests import as_gpu
from tests.e2e.asking import (
    Answer,
    answers_alone,
    ask,
    ask_all,
    await_tokens,
    requests_with_everything,
)
from tests.e2e.serving import Forked, Server, serving

TINY = Path(ppserve.__file__).parent / "assets" / "tiny"
NUM_STREAMS = 8


def long_requests(count: int, max_tokens: int = 100) -> list[pb.GenerateRequest]:
    requests = []
    for number in range(count):
        request = pb.GenerateRequest(text=f"Once upon a time, {number} small boats")
        request.sampling.seed = number
        request.sampling.temperature = 0.9
        request.stop.max_tokens = max_tokens
        request.stop.ignore_eos = True
        request.output.token_ids = True
        request.output.logprobs = 2
        requests.append(request)
    return requests


def ask_streams(server: Server) -> list[Answer]:
    return ask(server.grpc, long_requests(NUM_STREAMS), at_once=NUM_STREAMS)


def ask_and_hurt(server: Server, rank: int, signum: int, num_tensor: int = 1) -> list[Answer]:
    """The answers of all streams, during which a rank's stage is sent a signal."""
    answers: list[Answer] = []
    stage, tensor = divmod(rank, num_tensor)
    died = f"stage {stage}{f' tensor {tensor}' * (num_tensor > 1)} died"
    asking = threading.Thread(target=lambda: answers.extend(ask_streams(server)))
    since = len(server.log)
    asking.start()
    with grpc.insecure_channel(server.grpc) as channel:
        stub = GenerationServiceStub(channel)
        # Not before the streams are well under way: the witness has had many tokens by then. It is still under way
        # when they have ended, so that the loss is noticed however slowly this process reads.
        witness = stub.Generate(long_requests(1, max_tokens=900)[0])
        await_tokens(witness)
        os.kill(server.stage_pid(rank), signum)
        wait_for_line(server, died, since)
        asking.join()
        witness.cancel()
    assert server.log.count(died, since) == 1
    return answers


def wait_for_line(server: Server, pattern: str, since: int = 0) -> None:
    """Until the log has such a line, behind its first `since` characters."""
    until_s = time.monotonic() + 30
    while re.search(pattern, server.log[since:]) is None:
        assert time.monotonic() < until_s, f"no line {pattern!r}\n{server.log}"
        time.sleep(0.01)


@pytest.fixture(scope="module", params=["shm", "gloo"])
def three_stages(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server that several tests hurt; its stages are cut in the middle of layers. (Fresh interpreters are killed
    under torchrun in test_front_doors.)"""
    flags = ("--layers", "3,2.5,2.5", "--transport", request.param, "--log-level", "debug")
    with serving(3, *flags, by=Forked) as server:
        yield server


over_shm = pytest.mark.parametrize("three_stages", ["shm"], indirect=True)
"""For what does not depend on the transport."""


@pytest.fixture(scope="module")
def undisturbed() -> list[Answer]:
    """What all streams are to bring."""
    answers = [sequences[0] for sequences in answers_alone(long_requests(NUM_STREAMS))]
    assert {answer.end for answer in answers} == {"MAX_TOKENS"}
    return answers


@pytest.mark.timeout(240)
def test_kill_each_stage_in_turn(three_stages: Server, undisturbed: list[Answer]) -> None:
    assert ask_streams(three_stages) == undisturbed
    ranks = {three_stages.process.pid, *map(three_stages.rank_pid, range(3))}
    for stage in range(3):
        survivors = {three_stages.stage_pid(other) for other in range(3) if other != stage}
        assert ask_and_hurt(three_stages, stage, signal.SIGKILL) == undisturbed
        assert survivors <= {p.pid for p in three_stages.processes()}, "a survivor lost its weights"
    assert ranks <= {p.pid for p in three_stages.processes()}, "a rank died with its stage"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("transport", "victims"), [("shm", (3,)), ("gloo", (0,))])
def test_two_tensor_ranks_in_each_of_two_stages(
    transport: str, victims: tuple[int, ...], undisturbed: list[Answer]
) -> None:
    """They answer like one rank, and still do after one of them has been killed."""
    with serving(4, "--tensor-parallel", "2", "--transport", transport, by=Forked) as server:
        requests = requests_with_everything(12, seed=4)
        assert ask_all(server.grpc, requests, at_once=12) == answers_alone(requests)
        for rank in victims:
            survivors = {server.stage_pid(other) for other in range(4) if other != rank}
            assert ask_and_hurt(server, rank, signal.SIGKILL, num_tensor=2) == undisturbed
            assert survivors <= {p.pid for p in server.processes()}, "a survivor lost its weights"


@pytest.mark.timeout(240)
def test_one_stage_whose_steps_are_sent_ahead(undisturbed: list[Answer]) -> None:
    """With others beside it, and after it was killed, it answers like a request alone."""
    with serving(1, by=Forked) as server:
        requests = requests_with_everything(24, seed=6)
        assert ask_all(server.grpc, requests, at_once=24) == answers_alone(requests)
        for _ in range(2):
            assert ask_and_hurt(server, 0, signal.SIGKILL) == undisturbed


@pytest.mark.timeout(240)
def test_a_second_stage_dies_while_the_epoch_forms(three_stages: Server, undisturbed: list[Answer]) -> None:
    server, so_far = three_stages, len(three_stages.log)
    survivor, second = server.stage_pid(0), server.stage_pid(2)
    with grpc.insecure_channel(server.grpc) as channel:
        stub = GenerationServiceStub(channel)
        lost = stub.GetTopology(pb.GetTopologyRequest()).epoch
        answers: list[Answer] = []
        asking = threading.Thread(target=lambda: answers.extend(ask_streams(server)))
        asking.start()
        witness = stub.Generate(long_requests(1)[0])
        await_tokens(witness)
        os.kill(server.stage_pid(1), signal.SIGKILL)
        # Stage 2 has left the lost epoch, and comes no further: the others wait for it in the next one. Not
        # stopped before stage 1 is back, or the head could cut it off while stage 1 still loads.
        wait_for_line(server, f"stage 2 .*epoch {lost}: left", so_far)
        wait_for_line(server, r"stage 1 .*process \d+", so_far)
        os.kill(second, signal.SIGSTOP)
        wait_for_line(server, f"stage 0 .*epoch {lost + 1}: entering", so_far)
        wait_for_line(server, f"stage 1 .*epoch {lost + 1}: entering", so_far)
        with suppress(ProcessLookupError):  # on a loaded machine the head has cut it off before
            os.kill(second, signal.SIGKILL)
    asking.join()
    assert answers == undisturbed
    assert f"epoch {lost + 1} formed" not in server.log, "the second stage died too late"
    assert f"epoch {lost + 2} formed" in server.log
    assert server.stage_pid(0) == survivor, "a survivor lost its weights"


@over_shm
@pytest.mark.timeout(180)
def test_a_frozen_stage_is_replaced(three_stages: Server, undisturbed: list[Answer]) -> None:
    assert ask_and_hurt(three_stages, 1, signal.SIGSTOP) == undisturbed


@over_shm
@pytest.mark.timeout(180)
def test_requests_that_arrive_while_a_stage_is_away_are_served(
    three_stages: Server, undisturbed: list[Answer]
) -> None:
    so_far = len(three_stages.log)
    os.kill(three_stages.stage_pid(0), signal.SIGKILL)
    wait_for_line(three_stages, "stage 0 died", so_far)
    assert ask(three_stages.grpc, long_requests(1), at_once=1) == undisturbed[:1]


@pytest.mark.timeout(240)
def test_stages_killed_in_mid_guess_change_no_token_and_one_that_cannot_come_back_ends_streams_and_server(
    undisturbed: list[Answer], tmp_path: Path
) -> None:
    """Draft tokens forced into every step, most of them wrong; the drafter knows the answers' own repetitions
    only."""
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    with serving(2, "--model", str(model), "--speculate", "4", by=Forked) as server:
        for stage in (0, 1):
            assert ask_and_hurt(server, stage, signal.SIGKILL) == undisturbed
        outcomes = draft_tokens(server)
        assert outcomes["accepted"] > 0
        assert outcomes["rejected"] > 0
        lose_for_good(server, model / "model.safetensors")


def lose_for_good(server: Server, weights: Path) -> None:
    """Kills a stage whose weights are gone: the stream ends with a status, and the server with an error."""
    with grpc.insecure_channel(server.grpc) as channel:
        request = long_requests(1)[0]
        request.stop.max_tokens = 900
        stream = GenerationServiceStub(channel).Generate(request)
        next(iter(stream))
        weights.unlink()
        os.kill(server.stage_pid(1), signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as error:
            for _ in stream:
                pass
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert server.wait_exit() != 0
        assert "ppserve: error:" in server.log
        assert weights.name in server.log


def draft_tokens(server: Server) -> dict[str, float]:
    """Guessed tokens by what became of them."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as page:
        text = page.read().decode()
    found = re.findall(r'ppserve_draft_tokens_total\{outcome="(\w+)",replica="0"\} (\S+)', text)
    return {outcome: float(count) for outcome, count in found}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("flags", "told_of_it", "victim"),
    [
        (("--quantization", "int8", "--kv-dtype", "int8"), ("int8", "int8", "int8"), 0),
        (("--dtype", "bfloat16"), ("none", "bfloat16", "bfloat16"), 1),
    ],
    ids=["int8", "bfloat16"],
)
def test_tokens_of_other_precisions_are_the_same_across_a_loss(
    flags: tuple[str, ...], told_of_it: tuple[str, str, str], victim: int
) -> None:
    with serving(2, *flags, by=Forked) as server:
        with grpc.insecure_channel(server.grpc) as channel:
            told = GenerationServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest())
        assert told.deterministic, told.nondeterministic_reason
        kernels = told_of_it[2] if as_gpu.settings() else told.kernels.split()[0].strip(",")
        assert (told.quantization, told.kv_dtype, kernels) == told_of_it
        undisturbed = ask(server.grpc, long_requests(NUM_STREAMS), at_once=3)
        assert ask_and_hurt(server, victim, signal.SIGKILL) == undisturbed
