"""Stages die, freeze, or do not come back, while streams run."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest

import ppserve
from ppserve.stage.device import REFERENCE
from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests import as_gpu
from tests.e2e.asking import Answer, answers_alone, ask, ask_all, await_tokens, requests_with_everything
from tests.e2e.serving import Forked, Server, serving
from tests.slow import thorough

pytestmark = pytest.mark.timeout(240)

TINY = Path(ppserve.__file__).parent / "assets" / "tiny"


def long_requests(count: int, max_tokens: int = 100) -> list[pb.GenerateRequest]:
    return [
        pb.GenerateRequest(
            text=f"Once upon a time, {number} small boats",
            sampling=pb.SamplingParams(seed=number, temperature=0.9),
            stop=pb.StopConditions(max_tokens=max_tokens, ignore_eos=True),
            output=pb.OutputOptions(token_ids=True, logprobs=2),
        )
        for number in range(count)
    ]


STREAMS = long_requests(8)


@contextmanager
def asking(
    server: Server, requests: Sequence[pb.GenerateRequest], witness_tokens: int = 900
) -> Iterator[list[Answer]]:
    """Asks all at once, and yields the list that has their answers after the block.

    The block begins when the streams are well under way: a witness, a stream of so many tokens, has had many by
    then. It is still under way when they have ended, so that a loss is noticed however slowly this process reads.
    """
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.extend(ask(server.grpc, requests, at_once=len(requests))))
    thread.start()
    with grpc.insecure_channel(server.grpc) as channel:
        witness = GenerationServiceStub(channel).Generate(long_requests(1, witness_tokens)[0])
        await_tokens(witness)
        yield answers
        thread.join()
        witness.cancel()


def ask_and_hurt(
    server: Server, rank: int, signum: int, num_tensor: int = 1, requests: Sequence[pb.GenerateRequest] = STREAMS
) -> list[Answer]:
    """The answers of all streams, during which a rank's stage is sent a signal."""
    stage, tensor = divmod(rank, num_tensor)
    died = f"stage {stage} tensor {tensor} died" if num_tensor > 1 else f"stage {stage} died"
    since = len(server.log)
    with asking(server, requests) as answers:
        os.kill(server.stage_pid(rank), signum)
        server.wait_for_line(died, since)
    assert server.log.count(died, since) == 1
    return answers


@pytest.fixture(scope="module", params=["shm", *thorough("gloo")])
def three_stages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that several tests hurt; its stages are cut in the middle of layers. (Fresh interpreters are killed
    under torchrun in test_front_doors.) A logout removes its runtime directory, a cleaner the temporary one. An
    interface that is not there holds nothing up that stays within a host."""
    flags = ("--layers", "3,2.5,2.5", "--transport", request.param, "--log-level", "debug")
    places = {name: str(tmp_path_factory.mktemp("own")) for name in ("XDG_RUNTIME_DIR", "TMPDIR")}
    with serving(3, *flags, by=Forked, env={**places, "GLOO_SOCKET_IFNAME": "eth9"}) as server:
        for directory in places.values():
            assert os.listdir(directory) == []
            os.rmdir(directory)
        yield server


@pytest.fixture(scope="module")
def undisturbed() -> list[Answer]:
    """What all streams are to bring."""
    answers = [sequences[0] for sequences in answers_alone(STREAMS)]
    assert {answer.end for answer in answers} == {"MAX_TOKENS"}
    return answers


def shared_memory_of(pid: int) -> list[str]:
    """The links' memory that a stage has mapped."""
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:ppserve" in line]


def test_kill_each_stage_in_turn(three_stages: Server, undisturbed: list[Answer]) -> None:
    mapped = [len(shared_memory_of(three_stages.stage_pid(stage))) for stage in range(3)]
    ranks = {three_stages.process.pid, *map(three_stages.rank_pid, range(3))}
    for stage in range(3):
        survivors = {three_stages.stage_pid(other) for other in range(3) if other != stage}
        assert ask_and_hurt(three_stages, stage, signal.SIGKILL) == undisturbed
        assert survivors <= {p.pid for p in three_stages.processes()}, "a survivor lost its weights"
    assert ranks <= {p.pid for p in three_stages.processes()}, "a rank died with its stage"
    assert [len(shared_memory_of(three_stages.stage_pid(stage))) for stage in range(3)] == mapped


@pytest.mark.parametrize(
    ("transport", "victim"), [("gloo", 0), pytest.param("shm", 3, marks=pytest.mark.thorough)]
)
def test_two_tensor_ranks_in_each_of_two_stages(transport: str, victim: int, undisturbed: list[Answer]) -> None:
    """They answer like one rank, and still do after one of them has been killed."""
    with serving(4, "--tensor-parallel", "2", "--transport", transport, by=Forked) as server:
        requests = requests_with_everything(6, seed=4)
        assert ask_all(server.grpc, requests, at_once=6) == answers_alone(requests)
        survivors = {server.stage_pid(other) for other in range(4) if other != victim}
        assert ask_and_hurt(server, victim, signal.SIGKILL, 2, STREAMS[:4]) == undisturbed[:4]
        assert survivors <= {p.pid for p in server.processes()}, "a survivor lost its weights"


def test_one_stage_whose_steps_are_sent_ahead(undisturbed: list[Answer]) -> None:
    """It answers like a request alone, with others beside it, and after it was killed."""
    with serving(1, by=Forked) as server:
        requests = requests_with_everything(24, seed=6)
        assert ask_all(server.grpc, requests, at_once=24) == answers_alone(requests)
        assert ask_and_hurt(server, 0, signal.SIGKILL) == undisturbed


def test_a_second_stage_dies_while_the_epoch_forms(three_stages: Server, undisturbed: list[Answer]) -> None:
    server, so_far = three_stages, len(three_stages.log)
    survivor, second = server.stage_pid(0), server.stage_pid(2)
    with grpc.insecure_channel(server.grpc) as channel:
        lost = GenerationServiceStub(channel).GetTopology(pb.GetTopologyRequest()).epoch
    with asking(server, STREAMS, witness_tokens=100) as answers:
        os.kill(server.stage_pid(1), signal.SIGKILL)
        # Stage 2 has left the lost epoch, and comes no further: the others wait for it in the next one. Not
        # stopped before stage 1 is back, or the head could cut it off while stage 1 still loads.
        server.wait_for_line(f"stage 2 .*epoch {lost}: left", so_far)
        server.wait_for_line(r"stage 1 .*process \d+", so_far)
        os.kill(second, signal.SIGSTOP)
        for stage in (0, 1):
            server.wait_for_line(f"stage {stage} .*epoch {lost + 1}: entering", so_far)
        with suppress(ProcessLookupError):  # on a loaded machine the head has cut it off before
            os.kill(second, signal.SIGKILL)
    assert answers == undisturbed
    assert f"epoch {lost + 1} formed" not in server.log, "the second stage died too late"
    assert f"epoch {lost + 2} formed" in server.log
    assert server.stage_pid(0) == survivor, "a survivor lost its weights"


@pytest.mark.parametrize("three_stages", ["shm"], indirect=True)
def test_a_frozen_stage_is_replaced(three_stages: Server, undisturbed: list[Answer]) -> None:
    assert ask_and_hurt(three_stages, 1, signal.SIGSTOP) == undisturbed


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
        for outcome in ("accepted", "rejected"):
            assert server.metric("ppserve_draft_tokens_total", outcome=outcome) > 0
        lose_for_good(server, model / "model.safetensors")


def lose_for_good(server: Server, weights: Path) -> None:
    """Kills a stage whose weights are gone: the stream ends with a status, and the server with an error."""
    with grpc.insecure_channel(server.grpc) as channel:
        stream = GenerationServiceStub(channel).Generate(long_requests(1, 900)[0])
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


AS_GPU = ("--batch-invariant", "--max-num-seqs", "4", "--layers", "4.5,3.5")


@pytest.mark.parametrize(
    ("flags", "told_of_it", "victim"),
    [
        (("--quantization", "int8", "--kv-dtype", "int8"), ("int8", "int8", "int8"), 0),
        pytest.param(("--dtype", "bfloat16"), ("none", "bfloat16", "bfloat16"), 1, marks=pytest.mark.thorough),
        pytest.param(AS_GPU, ("none", "float32", "float32"), 1, marks=pytest.mark.thorough),
    ],
    ids=["int8", "bfloat16", "as-gpu"],
)
def test_tokens_of_other_numbers_and_devices_are_the_same_across_a_loss(
    flags: tuple[str, ...], told_of_it: tuple[str, str, str], victim: int
) -> None:
    is_gpu = flags is AS_GPU
    # The operators that stand for a GPU's are slow.
    requests = long_requests(3, 50) if is_gpu else STREAMS
    with serving(2, *flags, by=Forked, env={REFERENCE: "1"} if is_gpu else None) as server:
        with grpc.insecure_channel(server.grpc) as channel:
            told = GenerationServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest())
        assert told.deterministic, told.nondeterministic_reason
        kernels = told_of_it[2] if as_gpu.settings() or is_gpu else told.kernels.split()[0].strip(",")
        assert (told.quantization, told.kv_dtype, kernels) == told_of_it
        assert ("recording steps of 1 rows (3 of 3)" in server.log) >= is_gpu
        undisturbed = ask(server.grpc, requests, at_once=1 if is_gpu else 3)
        assert ask_and_hurt(server, victim, signal.SIGKILL, requests=requests) == undisturbed
