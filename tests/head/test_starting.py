"""While a pipeline starts, the log names what is missing, and the server ends when nothing happens for too long.

For `--parallel auto` the head waits for the Hello of every rank, and chooses the shape by what they measured.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from msgspec.structs import replace as changed

from ppserve import wire
from ppserve.config import CacheSettings, PipelineSettings, SchedulingSettings, ServeConfig
from ppserve.core.architecture import Architecture
from ppserve.core.partition import ExpectedWorkload, PartCosts
from ppserve.errors import ConfigError, StagesLost
from ppserve.head.engine.control import Disconnected, Received
from ppserve.head.engine.control_sockets import SocketControlPlane
from ppserve.head.starting import TELL_EVERY_S, WaitLimit, compare_shapes, find_missing, wait_for_greetings
from ppserve.planning.shapes import shape_name
from tests.head.engine.scripted import SECOND, MembersRig, ScriptedControl
from tests.hellos import hello as hello_of

ARCH = Architecture(4, 64, 4, 128, 300, 300, 256)
GAVE_UP = Received(1, 1, wire.Failed("no such file"))

Event = Received | Disconnected


def hello(rank: int, host: str = "here") -> Received:
    return Received(rank, 1, hello_of(rank, 2, ARCH, host))


NEW = hello(0, "new")


def test_who_is_missing_is_told_every_half_minute(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = MembersRig(2)
    limit = WaitLimit(1000.0, now_s=0.0)
    pipeline.hello(0)
    for second in range(int(3 * TELL_EVERY_S)):
        assert limit.check(*find_missing([pipeline.members]), float(second)) is None
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "stage 1 (rank 1), which has not come" in told[0]
    assert "--secret-file" in told[0]


def test_a_start_without_progress_ends_with_the_reason_and_one_with_progress_does_not() -> None:
    pipeline = MembersRig(2)
    limit = WaitLimit(60.0, now_s=0.0)

    def check(now_s: float) -> StagesLost | None:
        return limit.check(*find_missing([pipeline.members]), now_s)

    assert check(50.0) is None
    for stage in range(2):
        pipeline.hello(stage)
    pipeline.loaded(0)
    for number in range(5):
        pipeline.say(1, wire.Loading(number, 9))
        assert check(100.0 + 50 * number) is None, "it loads, however slowly"
    assert check(355.0) is None
    end = check(361.0)
    assert end is not None
    assert "--start-timeout" in str(end)
    assert "stage 1 (rank 1), which loads its weights, 4 B of 9 B" in str(end)
    assert "stage 0" not in str(end)


class TurnsControl(ScriptedControl):
    """A control plane on which turns of messages arrive as written here."""

    def __init__(self, *turns: list[Event]) -> None:
        super().__init__()
        self.turns = deque(turns)
        self.put: list[Received] = []

    def poll(self, timeout_s: float) -> list[Event]:
        return self.turns.popleft()

    def put_back(self, heard: Sequence[Received]) -> None:
        self.put = list(heard)


def wait(*turns: list[Event], limit_s: float = 1000.0) -> TurnsControl:
    """Until all have greeted, or after the last turn: what is returned is what the engine receives again."""
    control, limit = TurnsControl(*turns), WaitLimit(limit_s, time.monotonic())
    found = wait_for_greetings(cast("SocketControlPlane", control), 2, limit, lambda: not control.turns)
    assert [found[heard.rank] for heard in control.put] == [heard.message for heard in control.put]
    return control


@pytest.mark.parametrize(
    ("turns", "greetings"),
    [
        ([[hello(1)], [], [Received(1, 2, wire.Heartbeat(1, 1))], [hello(0)], []], [hello(1), hello(0)]),
        ([[hello(0, "old")], [Disconnected(0, "exit"), hello(1)], [NEW], []], [hello(1), NEW]),
        ([[hello(0)], []], [hello(0)]),
        ([[hello(0), hello(1), Disconnected(1, "exit")]], [hello(0)]),
        ([[hello(0), GAVE_UP], [hello(1)]], [hello(0), GAVE_UP]),
    ],
    ids=["all", "one died and came back", "a signal", "one died", "one cannot serve"],
)
def test_the_greetings_of_living_ranks_are_returned_and_put_back(
    turns: list[list[Event]], greetings: list[Received]
) -> None:
    assert wait(*turns).put == greetings


def test_ranks_that_wait_are_pinged() -> None:
    control = wait([hello(0)], [], [hello(1)])
    assert {(rank, type(message)) for rank, message in control.sent} == {(0, wire.Ping)}


def test_a_rank_that_has_waited_for_the_others_is_not_silent() -> None:
    """The engine receives its Hello as late as all others."""
    pipeline = MembersRig(2)
    pipeline.members.handle_message(0, pipeline.now_ns - 600 * SECOND, hello(0).message)
    pipeline.hello(1)
    pipeline.tick(2.0)
    assert pipeline.dropped == []


def test_ranks_that_have_not_measured_are_named() -> None:
    with pytest.raises(StagesLost, match=r"waiting for rank 1, which has not come.*--parallel auto"):
        wait([hello(0)], [], [], limit_s=0.0)


# ---- the shape of `--parallel auto` -----------------------------------------------------------------------

GPT2 = Architecture(12, 768, 12, 1024, 50257, 50257, 3072)
# As on a core where reading the weights takes most of a step.
READS = PartCosts(attention=1e-3, mlp=2e-3, overhead=0.5e-3, head=13e-3)
HALF = PartCosts(attention=0.5e-3, mlp=1e-3, overhead=0.5e-3, head=7e-3)


def hellos(count: int, **about: Any) -> list[wire.Hello]:
    cores, costs = about.pop("cores", 0), about.pop("costs", {1: READS, 2: HALF})
    host = wire.StageHost("here", about.pop("machine", "one"), cores=cores)
    device = wire.StageDevice(**{"memory_bytes": 4 << 30, "kv_bytes": 2 << 30, **about})
    return [changed(hello_of(rank, count, GPT2, host, device=device), costs=costs) for rank in range(count)]


def apart(**about: Any) -> list[wire.Hello]:
    """Of two ranks on two hosts."""
    first, second = hellos(2, **about)
    return [first, changed(second, host=wire.StageHost("there", "another"))]


def config(callers: int = 16, threads: int | None = None) -> ServeConfig:
    scheduling = SchedulingSettings(expect=ExpectedWorkload(32, 32, callers))
    return ServeConfig(pipeline=PipelineSettings(parallel="auto", threads=threads), scheduling=scheduling)


def rates(asked: ServeConfig, of: list[wire.Hello]) -> dict[str, float]:
    return {shape_name(p.grid): p.tokens_per_s or 0.0 for p in compare_shapes(asked, of)}


def test_the_shape_follows_from_the_load_and_the_network() -> None:
    one_host = rates(config(), hellos(2))
    assert list(one_host) == ["2x1x1", "1x1x2", "1x2x1"], "weights are read once for all callers"
    assert rates(config(), apart())["2x1x1"] < one_host["2x1x1"], "gathers between hosts take longer"


def test_tensor_ranks_are_predicted_by_what_they_measured_as_such() -> None:
    """Not as their share of the whole model: small operators are not divided."""
    slow = {1: READS, 2: replace(READS, overhead=1e-3)}
    assert next(iter(rates(config(), hellos(2, costs=slow)))) != "2x1x1"


def test_the_mean_of_all_ranks_counts() -> None:
    first, second = hellos(2)
    slower, doubled = (
        {count: replace(costs, head=factor * costs.head) for count, costs in ((1, READS), (2, HALF))}
        for factor in (3, 2)
    )
    mixed = rates(config(), [first, changed(second, costs=slower)])
    assert mixed == pytest.approx(rates(config(), hellos(2, costs=doubled)))


def test_ranks_share_the_cores_of_their_machine() -> None:
    own, scarce = (rates(config(threads=1), hellos(2, cores=cores)) for cores in (2, 1))
    assert own == pytest.approx(rates(config(threads=1), hellos(2, cores=8)))
    assert scarce["2x1x1"] == pytest.approx(own["2x1x1"] / 2, rel=0.05)
    assert rates(config(threads=1), apart(cores=1))["1x1x2"] > 1.8 * scarce["1x1x2"]
    assert rates(config(threads=2), hellos(2, cores=2)) == pytest.approx(scarce), "each rank keeps two cores busy"


def test_what_does_not_fit_is_not_taken() -> None:
    found = compare_shapes(config(), hellos(2, memory_bytes=640 << 20))
    assert {shape_name(p.grid) for p in found if p.fits} == {"2x1x1", "1x2x1"}


@pytest.mark.parametrize(("left_mib", "sequences"), [(80, 0), (84, 1), (300, 1), (600, 2)])
def test_of_what_the_weights_leave_a_shape_has_a_quarter_or_one_sequence_unless_told(
    left_mib: int, sequences: int
) -> None:
    """All weights take 622 MiB, and a full sequence 72. Of 80 MiB 7/8 are 70, of 84 they are 73.5."""
    room = {"memory_bytes": (622 + left_mib) << 20, "kv_bytes": 80 << 20}
    found = {shape_name(p.grid): p for p in compare_shapes(config(), hellos(2, **room))}
    assert found["1x1x2"].plan.max_sequences == sequences
    assert found["1x1x2"].fits == (sequences > 0)
    assert all(found[halved].fits for halved in ("1x2x1", "2x1x1")), "each rank has half of the weights"
    told = replace(config(), cache=CacheSettings(kv_cache_memory=80 << 20))
    assert all(p.fits for p in compare_shapes(told, hellos(2, **room)))


def test_a_rank_that_was_started_otherwise_is_refused() -> None:
    with pytest.raises(ConfigError, match="--parallel: auto: not every rank was started with it"):
        compare_shapes(config(), [*hellos(1), *hellos(2, costs={1: READS})[1:]])
