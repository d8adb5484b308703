"""Which stages are refused, which transport connects the others, and by which addresses they reach each other."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from ppserve import wire
from ppserve.config import PipelineSettings, ServeConfig
from ppserve.core.architecture import Split, stage_layouts
from ppserve.core.grid import RankGrid
from ppserve.core.partition import PartCosts
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.errors import ConfigError
from ppserve.head.engine.member import Decision
from ppserve.head.engine.placement import count_blocks, decide, stage_addresses
from tests.architectures import gpt2 as gpt2_architecture
from tests.hellos import changed, host_of
from tests.hellos import hello as hello_of

ARCH = gpt2_architecture(8, 160, 5, 1024, 1280, 1280, 640)
SAME_HOST = "shm" if sys.platform == "linux" else "gloo"


def hello(
    stage: int, host: str = "a", gpu: int | None = None, shares_gpu: bool = False, user: str = "1"
) -> wire.Hello:
    at = host_of(host, "10.0.0.1", "10.0.0.1", user=user)
    return hello_of(stage, 2, ARCH, at, device=wire.StageDevice(gpu, shares_gpu))


@pytest.mark.parametrize(
    ("hellos", "chosen"),
    [
        ((hello(0),), "local"),
        ((hello(0), hello(1)), SAME_HOST),
        ((hello(0), hello(1, host="b")), "gloo"),
        ((hello(0), hello(1, user="2")), "gloo"),
        ((hello(0, gpu=0), hello(1, gpu=1)), "nccl"),
        ((hello(0, gpu=0), hello(1, host="b", gpu=0)), "nccl"),
        ((hello(0, gpu=0, shares_gpu=True), hello(1, gpu=0, shares_gpu=True)), SAME_HOST),
        ((hello(0, gpu=0), hello(1)), SAME_HOST),
    ],
)
def test_auto_takes_the_best_that_connects_all(hellos: tuple[wire.Hello, ...], chosen: str) -> None:
    assert decide(ServeConfig(), hellos).transport == chosen


def test_steps_are_predicted_by_the_mean_of_what_all_ranks_measured() -> None:
    costs = [PartCosts(seconds, 0.0, 0.0, 0.0) for seconds in (1.0, 3.0)]
    measured = [hello_of(rank, 2, ARCH, costs=each) for rank, each in enumerate(costs)]
    decision = decide(ServeConfig(), tuple(measured))
    assert (decision.parts, decision.layers) == (PartCosts(2.0, 0.0, 0.0, 0.0), "4,4 (predicted balance 100%)")
    unmeasured = decide(ServeConfig(), (measured[0], hello(1, host="here")))
    assert (unmeasured.parts, unmeasured.layers) == (None, "4.5,3.5")


# ---- addresses ---------------------------------------------------------------------------------------------


def at(stage: int, machine: str, own: str, head: str) -> wire.Hello:
    return hello_of(stage, 2, ARCH, host_of(machine, own, head))


LOOP = "127.0.0.1"


@pytest.mark.parametrize(
    ("hellos", "expected"),
    [
        ((at(0, "a", "10.0.0.1", "10.0.0.1"), at(1, "a", "10.0.0.1", "10.0.0.1")), (LOOP, LOOP)),
        ((at(0, "a", "10.0.0.1", "10.0.0.1"), at(1, "b", "10.0.0.2", "10.0.0.1")), ("10.0.0.1", "10.0.0.2")),
        ((at(0, "a", LOOP, "127.0.1.1"), at(1, "b", "10.0.0.2", "10.0.0.1")), ("10.0.0.1", "10.0.0.2")),
        ((at(0, "a", "::1", "::1"), at(1, "b", "fd00::2", "fd00::1")), ("fd00::1", "fd00::2")),
    ],
    ids=["one host", "two", "the head by its own name, which is loopback", "the same in IPv6"],
)
def test_stages_are_reached_by_addresses_that_others_can_use(
    hellos: tuple[wire.Hello, ...], expected: tuple[str, ...]
) -> None:
    assert stage_addresses(hellos, RankGrid(1, 1, 2)) == expected


def test_a_stage_that_only_its_own_host_can_reach_is_refused_by_name() -> None:
    hellos = (at(0, "a", LOOP, LOOP), at(1, "b", LOOP, LOOP))
    with pytest.raises(ConfigError, match="--interface: other hosts cannot reach stage 0 on a"):
        stage_addresses(hellos, RankGrid(1, 1, 2))
    with pytest.raises(ConfigError, match="cannot reach stage 0 tensor 1 on b"):
        stage_addresses((at(0, "a", "10.0.0.1", LOOP), at(1, "b", LOOP, LOOP)), RankGrid(2, 1, 1))


# ---- what is refused, by the flag's name ----


@pytest.mark.parametrize(
    ("asked", "second", "says"),
    [
        ("nccl", hello(1), "--transport: nccl needs a GPU of its own for every stage"),
        ("shm", hello(1, host="b"), "--transport: shm needs all stages on one host"),
        ("shm", hello(1, user="2"), "--transport: shm needs all stages on one host, started by one user"),
        (
            "auto",
            changed(hello(1), dtype="bfloat16"),
            "--dtype: stage 1 on a has dtype bfloat16 instead",
        ),
        ("auto", changed(hello(1), quantization="int8"), "--quantization: stage 1 on a has quantization int8"),
        (
            "auto",
            changed(hello(1), kv_dtype="int8"),
            "--kv-dtype: stage 1 on a has kv-dtype int8 instead",
        ),
        (
            "auto",
            changed(hello(1, host="b"), weights="trained on", checkpoint="/n"),
            "--model: stage 1 on b has other weights in /n, unlike stage 0 on a",
        ),
        (
            "auto",
            changed(hello(1), architecture=dataclasses.replace(ARCH, layers=ARCH.layers[:1] * 7)),
            "--model: stage 1 on a has another model in /m, unlike stage 0 on a",
        ),
    ],
)
def test_what_cannot_be_connected_and_stages_that_differ_are_refused(
    asked: str, second: wire.Hello, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        decide(ServeConfig(pipeline=PipelineSettings(transport=asked)), (hello(0), second))


@pytest.mark.parametrize(("blocks", "expected"), [((7, 9), 7), ((30, 28), 28), ((30, 29), 28)])
def test_as_many_blocks_as_the_tightest_stage_holds_and_full_sequences_use(
    blocks: tuple[int, int], expected: int
) -> None:
    """A context of 100 tokens takes seven blocks of 16, the last of them in part. There are four sequences."""
    assert count_blocks(*with_room_for(blocks)) == expected


def test_a_stage_without_room_for_a_whole_sequence_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"stage 1 has 6999 bytes .* 96 tokens; .* 100 \(7000 bytes\); .*-len to 96,"
    ):
        count_blocks(*with_room_for((7, 6)))
    with pytest.raises(
        ConfigError, match=r"room for 0 tokens; .*\(7000 bytes\); free memory on its host or give it"
    ):
        count_blocks(*with_room_for((7, 0)))


def with_room_for(blocks: tuple[int, int]) -> tuple[Decision, list[wire.Loaded]]:
    scheduling = SchedulerConfig(2, max_num_seqs=4, max_model_len=100, block_size=16)
    loaded = [wire.Loaded("cpu", 1, 1, 1000, 1000 * count + 999, None) for count in blocks]
    return Decision(stage_layouts(Split((8, 8))), "shm", scheduling), loaded
