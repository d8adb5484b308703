"""The keeper against stages that follow a script, on a clock that they move: no processes and no waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ppserve import wire
from ppserve.config import PipelineSettings, ServeConfig
from ppserve.process.keeper import FROZEN_AFTER_S, FROZEN_WHILE_PREPARING_S, HEADLESS_FOR_S, MAX_DEATHS, Keeper
from ppserve.process.lifetime import EXIT_FAILED, EXIT_HEAD_GONE, EXIT_USAGE
from tests.process.heads import head

KILLED = -9
CRASHED = -11
ENDPOINT = wire.HeadEndpoint("@nobody/listens", Path("/nobody/knows"))
START = wire.Start(ServeConfig(), 1, 2, ENDPOINT)
KNOWS_HEAD = "started\nconnected"
FOREVER = float("inf")
ONE_REPLICA = PipelineSettings()

# Seconds after the event before it, and a line that the stage writes or something that happens meanwhile.
Event = tuple[float, str | Callable[[], object]]


class ScriptedStage:
    """Lives through its events, then ends with `code`; a silence of FOREVER is a stage that is frozen."""

    def __init__(self, scene: Scene, events: Iterable[Event], code: int) -> None:
        self._scene = scene
        self._events = list(events)
        self._code = code
        self.started: wire.Start | None = None
        self.killed_at_s: float | None = None
        self.has_ended = False

    def start(self, start: wire.Start) -> None:
        assert self.started is None
        self.started = start

    def listen(self, timeout_s: float) -> list[str] | None:
        if not self._events or self.killed_at_s is not None:
            return None
        after_s, event = self._events[0]
        if after_s > timeout_s:
            self._scene.now_s += timeout_s
            self._events[0] = (after_s - timeout_s, event)
            return []
        self._scene.now_s += after_s
        del self._events[0]
        if isinstance(event, str):
            return event.split("\n")
        event()
        return []

    def kill(self) -> None:
        if self.killed_at_s is None:
            self.killed_at_s = self._scene.now_s

    def reap(self) -> int:
        assert not self.has_ended
        self.has_ended = True
        return self._code if self.killed_at_s is None else KILLED


class Scene:
    """A keeper of stage 1 of 2, and its fork server with the stages that it will fork, in this order."""

    def __init__(self, endpoint: wire.HeadEndpoint = ENDPOINT, pipeline: PipelineSettings = ONE_REPLICA) -> None:
        self.now_s = 1000.0
        self.stages: list[ScriptedStage] = []
        self._next: Iterator[ScriptedStage] = iter(())
        self.num_forked = 0
        self.no_files = range(0)
        """Attempts to start a stage, counted from 1, at which the system has no descriptor left."""
        self.num_attempts = 0
        self.on_sleep: Callable[[], object] = lambda: None
        self.has_ended = False
        about: Any = ServeConfig(pipeline=pipeline), 1, 2, endpoint, self
        self.keeper = Keeper(*about, clock=lambda: self.now_s, sleep=self._sleep)

    def stage(self, *events: Event, code: int = CRASHED, times: int = 1) -> ScriptedStage:
        """The next one, or so many of the same kind."""
        self.stages += [ScriptedStage(self, events, code) for _ in range(times)]
        return self.stages[-1]

    def run(self) -> int:
        self._next = iter(self.stages)
        return self.keeper.run()

    def fork(self) -> ScriptedStage:
        self.num_attempts += 1
        if self.num_attempts in self.no_files:
            raise OSError(24, "Too many open files")
        self.num_forked += 1
        return next(self._next)

    def close(self) -> int:
        self.has_ended = True
        return KILLED

    def _sleep(self, seconds: float) -> None:
        self.on_sleep()
        self.now_s += seconds


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.mark.parametrize(("code", "exit_code"), [(0, 0), (EXIT_USAGE, EXIT_USAGE), (EXIT_FAILED, 1)])
def test_an_end_that_a_restart_would_not_mend_ends_the_rank(scene: Scene, code: int, exit_code: int) -> None:
    stage = scene.stage((1, KNOWS_HEAD), (1, ""), code=code)
    assert scene.run() == exit_code
    assert scene.num_forked == 1
    assert stage.started == START
    assert stage.has_ended
    assert scene.has_ended, "the fork server lives on"


@pytest.mark.parametrize("code", [KILLED, CRASHED, 1, EXIT_HEAD_GONE])
def test_other_ends_are_followed_by_another_life(scene: Scene, code: int) -> None:
    scene.stage()  # one that dies at once
    scene.stage((1, KNOWS_HEAD), code=code)
    scene.stage((0, KNOWS_HEAD), times=MAX_DEATHS - 3)
    last = scene.stage(code=0)
    assert scene.run() == 0
    assert last.started == START
    assert scene.now_s == 1001, "each is followed at once"


@pytest.mark.parametrize(
    ("pipeline", "last_line", "exit_code"),
    [
        (PipelineSettings(replicas=2), "ready", 0),
        (ONE_REPLICA, "ready", EXIT_USAGE),
        (PipelineSettings(replicas=2), "", EXIT_USAGE),
    ],
)
@pytest.mark.parametrize("code", [EXIT_HEAD_GONE, KILLED])
def test_a_rank_that_was_ready_and_cannot_come_back_leaves_other_replicas_alone(
    pipeline: PipelineSettings, last_line: str, exit_code: int, code: int
) -> None:
    """The rank may be one that no request has reached yet. One that was never ready ends all."""
    scene = Scene(pipeline=pipeline)
    scene.stage((1, KNOWS_HEAD), (1, last_line), code=code)
    scene.stage((1, KNOWS_HEAD), code=EXIT_USAGE)
    assert scene.run() == exit_code


# ---- a frozen stage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "limit_s"), [("started", FROZEN_WHILE_PREPARING_S), (KNOWS_HEAD, FROZEN_AFTER_S)]
)
def test_a_frozen_stage_is_replaced_later_while_it_imports(scene: Scene, line: str, limit_s: float) -> None:
    frozen = scene.stage((1, line), (3, ""), (FOREVER, ""))
    scene.stage(code=0)
    assert scene.run() == 0
    assert frozen.killed_at_s is not None
    assert limit_s < frozen.killed_at_s - 1004 <= limit_s + 1


def test_signs_of_life_keep_a_stage_alive_and_a_keeper_that_was_held_up_listens_first(scene: Scene) -> None:
    """Each new stage has the long limit again."""

    def hold_up() -> None:
        scene.now_s += 10 * FROZEN_WHILE_PREPARING_S

    scene.stage((1, KNOWS_HEAD), *[(FROZEN_AFTER_S - 0.5, "")] * 50, (0, hold_up), (0, ""), (1, ""))
    long_s = FROZEN_WHILE_PREPARING_S - 1
    scene.stage((long_s, ""), (long_s, KNOWS_HEAD), code=0)
    assert scene.run() == 0
    assert [stage.killed_at_s for stage in scene.stages] == [None, None]


# ---- a stage that keeps dying ------------------------------------------------------------------------------


def test_the_head_is_told_when_a_stage_keeps_dying(tmp_path: Path) -> None:
    with head(tmp_path) as listening:
        scene = Scene(listening.endpoint)
        scene.stage((1, ""), times=MAX_DEATHS)
        assert scene.run() == 1
        told = listening.next_event()
    assert scene.num_forked == MAX_DEATHS
    reason = f"stage 1 died {MAX_DEATHS} times in a row (last code {CRASHED})"
    assert (told.rank, told.message) == (1, wire.Failed(reason))


def test_a_cause_that_passes_by_does_not_use_up_all_lives(scene: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    """Each is forked within milliseconds, and dies within them. No head can be told of it."""
    scene.stage(times=MAX_DEATHS, code=KILLED)
    assert scene.run() == 1
    assert 15 < scene.now_s - 1000 < 45
    assert f"stage 1 died {MAX_DEATHS} times in a row (last code -9)" in capfd.readouterr().err


def test_no_life_is_waited_for_longer_than_a_stop_lasts(scene: Scene) -> None:
    scene.stage(times=MAX_DEATHS)
    scene.on_sleep = lambda: scene.keeper.stop(20.0)
    assert scene.run() == 1
    assert scene.now_s <= 1000.5
    assert scene.num_forked == 3, "the third is killed at once"


def test_a_stage_without_a_head_is_not_to_blame_but_is_not_started_for_ever(
    scene: Scene, capfd: pytest.CaptureFixture[str]
) -> None:
    life_s = 60
    scene.stage((1, "started"), *[(1, "")] * (life_s - 1), code=EXIT_HEAD_GONE, times=100)
    assert scene.run() == 1
    assert scene.num_forked == HEADLESS_FOR_S // life_s + 1
    assert "stage 1 found no head for 900 s" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("last_line", "code", "seconds"), [("", EXIT_HEAD_GONE, 1), ("ready", CRASHED, 1), ("", KILLED, 3600)]
)
def test_lives_without_a_step_count_however_slowly_they_end(
    scene: Scene, last_line: str, code: int, seconds: int
) -> None:
    scene.stage((1, KNOWS_HEAD), *[(1, last_line)] * seconds, code=code, times=MAX_DEATHS)
    assert scene.run() == 1
    assert scene.num_forked == MAX_DEATHS


def test_a_life_that_computed_or_lost_an_idle_link_starts_the_count_anew(scene: Scene) -> None:
    scene.stage((1, KNOWS_HEAD), times=MAX_DEATHS - 1)
    scene.stage((1, KNOWS_HEAD), (1, "served"))
    scene.stage((1, KNOWS_HEAD), times=MAX_DEATHS - 2)
    scene.stage((1, KNOWS_HEAD), (1, "ready"), code=EXIT_HEAD_GONE, times=2 * MAX_DEATHS)
    scene.stage(code=0)
    assert scene.run() == 0


# ---- a stage that the system cannot start ------------------------------------------------------------------


def test_a_stage_that_cannot_be_started_is_tried_again(scene: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    scene.no_files = range(2, 6)
    scene.stage((1, KNOWS_HEAD))
    second = scene.stage(code=0)
    assert scene.run() == 0
    assert second.started == START
    assert capfd.readouterr().err.count("stage 1 cannot be started now: [Errno 24]") == 4


@pytest.mark.parametrize("grace_s", [3.0, 1000.0])
def test_it_is_not_tried_for_ever_nor_longer_than_a_stop_lasts(scene: Scene, grace_s: float) -> None:
    scene.no_files = range(2, 10_000)
    scene.stage((1, KNOWS_HEAD), (0, lambda: scene.keeper.stop(grace_s)))
    assert scene.run() == 1
    assert scene.num_attempts <= MAX_DEATHS
    if grace_s == 3.0:
        assert scene.now_s <= 1001 + grace_s + 0.5


# ---- stopping ----------------------------------------------------------------------------------------------


def test_a_second_stop_can_only_shorten_the_grace(scene: Scene) -> None:
    stubborn = scene.stage(
        (1, KNOWS_HEAD),
        (0, lambda: scene.keeper.stop(20)),
        (1, lambda: scene.keeper.stop(3)),
        (1, lambda: scene.keeper.stop(500)),
        *[(1, "")] * 1000,
    )
    assert scene.run() == 1
    assert stubborn.killed_at_s is not None
    assert 1005 < stubborn.killed_at_s <= 1007


@pytest.mark.parametrize(("code", "is_replaced"), [(CRASHED, True), (EXIT_HEAD_GONE, False)])
def test_a_stage_that_ends_while_streams_finish_is_replaced_while_there_is_a_head(
    scene: Scene, code: int, is_replaced: bool
) -> None:
    scene.stage((1, KNOWS_HEAD), (1, lambda: scene.keeper.stop(20)), (1, ""), code=code)
    scene.stage((1, KNOWS_HEAD), (1, "served"), code=0)
    assert scene.run() == (0 if is_replaced else 1)
    assert scene.num_forked == 1 + is_replaced


@pytest.mark.parametrize("loses_head", [False, True])
def test_a_stop_without_a_head_kills_at_once(scene: Scene, loses_head: bool) -> None:
    """torchrun ends the others when it sees that the head has died, and waits 30 s for who does not end. A stage
    sees it sooner: the next one may be looking by then for a head that comes only when all have ended."""
    if loses_head:
        scene.stage((1, KNOWS_HEAD), code=EXIT_HEAD_GONE)
    looking = scene.stage((1, "started"), (1, lambda: scene.keeper.stop(32)), (FOREVER, ""))
    assert scene.run() == 1
    assert looking.killed_at_s == 1002 + loses_head
    assert scene.num_forked == 1 + loses_head
