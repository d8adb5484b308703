"""The members' states and the epochs, without sockets or a clock."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec
import pytest

from ppserve import wire
from ppserve.core.architecture import Architecture, Split, stage_layouts
from ppserve.core.grid import RankGrid
from ppserve.core.plan import StepResult, StepStamps
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.errors import ConfigError
from ppserve.head.engine.member import (
    Decision,
    EpochLost,
    Formed,
    Hopeless,
    InvalidMove,
    Member,
    MemberEvent,
    StageDied,
    StageState,
)
from ppserve.head.engine.members import Members

ARCH = Architecture(4, 64, 4, 128, 300, 300, 256)
SECOND = 1_000_000_000


@dataclass
class MembersRig:
    """Members without connections: records what they send and which ranks they drop. The test sets the time."""

    num_stages: int
    split: Split | None = None
    mistake: ConfigError | None = None
    sent: list[tuple[int, object]] = field(default_factory=list)
    dropped: list[tuple[int, str]] = field(default_factory=list)
    now_ns: int = SECOND

    def __post_init__(self) -> None:
        self.members = Members(RankGrid(1, 1, self.num_stages), "here", self, self)
        self.members.start(self.now_ns)

    def decide(self, hellos: tuple[wire.Hello, ...]) -> Decision:
        if self.mistake is not None:
            raise self.mistake
        layouts = stage_layouts(self.split or Split((2,) * self.num_stages))
        return Decision(ARCH, layouts, "float32", "gloo", SchedulerConfig(self.num_stages))

    def num_blocks(self, decision: Decision, loaded: tuple[wire.Loaded, ...]) -> int:
        return min(x.kv_bytes // x.block_bytes for x in loaded)

    def send(self, rank: int, message: object) -> None:
        self.sent.append((rank, message))

    def drop(self, rank: int, cause: str) -> None:
        self.dropped.append((rank, cause))

    def say(self, stage: int, message: object) -> list[MemberEvent]:
        return self.members.heard(stage, self.now_ns, message)

    def hello(self, stage: int, machine: str = "here", arch: Architecture = ARCH) -> list[MemberEvent]:
        about = (stage, self.num_stages, "same name", "/m", arch, "float32", None, False, None)
        return self.say(stage, wire.Hello(*about, machine, "10.0.0.1", "10.0.0.1"))

    def loaded(self, stage: int) -> list[MemberEvent]:
        return self.say(stage, wire.Loaded("cpu", 1, 1, 100, 1000 + stage * 100, ""))

    def tick(self, seconds: float) -> list[MemberEvent]:
        self.now_ns += int(seconds * SECOND)
        return self.members.tick(self.now_ns)

    def forms(self) -> dict[int, wire.Form]:
        """The `Form` messages sent since the last call."""
        found = {stage: message for stage, message in self.sent if isinstance(message, wire.Form)}
        self.sent.clear()
        return found

    def join(self) -> list[MemberEvent]:
        """From the Form of stage 0 to the Ready of all stages."""
        epoch = self.members.epoch
        assert set(self.forms()) == {0}
        self.say(0, wire.StoreOpened(epoch, 4000 + epoch))
        others = self.forms()
        assert set(others) == set(range(1, self.num_stages))
        assert all(form.store_port == 4000 + epoch for form in others.values())
        events: list[MemberEvent] = []
        for stage in range(self.num_stages):
            assert not events, "formed before everybody was ready"
            events = self.say(stage, wire.Ready(epoch))
        return events

    def leave(self, *stages: int) -> list[MemberEvent]:
        """Checks that these stages, and no others, were told to abandon the epoch; they answer that they left
        it."""
        epoch = self.members.epoch
        told = {stage for stage, message in self.sent if isinstance(message, wire.Abandon)}
        assert told == set(stages)
        assert all(m == wire.Abandon(epoch) for _, m in self.sent if isinstance(m, wire.Abandon))
        self.sent.clear()
        return [event for stage in stages for event in self.say(stage, wire.Broken(epoch, "told"))]

    def start(self) -> list[MemberEvent]:
        for stage in range(self.num_stages):
            self.hello(stage)
        for stage in range(self.num_stages):
            self.loaded(stage)
        return self.join()


def result(epoch: int) -> wire.Result:
    return wire.Result(StepResult(epoch, 1, 0, StepStamps(1, 2, 3, 4, 5, 6)))


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_forms_once_all_are_ready_with_the_tightest_stages_blocks(num_stages: int) -> None:
    pipeline = MembersRig(num_stages)
    assert pipeline.start() == [Formed(1, 10)]
    assert pipeline.members.healthy(pipeline.now_ns)


def test_one_stage_needs_no_store() -> None:
    pipeline = MembersRig(1)
    pipeline.hello(0)
    pipeline.loaded(0)
    assert set(pipeline.forms()) == {0}
    assert pipeline.say(0, wire.Ready(1)) == [Formed(1, 10)]


def test_nothing_is_assigned_before_all_have_greeted() -> None:
    pipeline = MembersRig(2)
    pipeline.hello(1)
    assert pipeline.sent == []
    pipeline.hello(0)
    assert {stage for stage, message in pipeline.sent if isinstance(message, wire.Assign)} == {0, 1}


def test_a_lost_stage_begins_a_new_epoch_when_it_is_back() -> None:
    pipeline = MembersRig(3)
    pipeline.start()
    events = pipeline.members.gone(1, "exit", pipeline.now_ns)
    assert events == [StageDied(1, 1, "exit"), EpochLost(1, "stage 1: exit", 1)]
    assert not pipeline.members.formed
    assert pipeline.say(0, result(1)) == [], "a result of a lost epoch counts for nothing"
    assert pipeline.leave(0, 2) == []
    pipeline.tick(1)
    assert pipeline.forms() == {}, "the epoch must not form without stage 1"
    pipeline.hello(1)
    pipeline.loaded(1)
    assert pipeline.join() == [Formed(2, 10)]
    assert [m.restarts for m in pipeline.members.all] == [0, 1, 0]
    assert len(pipeline.say(0, result(2))) == 1


def test_an_epoch_does_not_form_before_the_death_behind_a_broken_transport_is_known() -> None:
    pipeline = MembersRig(2)
    pipeline.start()
    assert pipeline.say(0, wire.Broken(1, "reset")) == [EpochLost(1, "reset", 0)]
    pipeline.tick(1)
    assert pipeline.forms() == {}, "stage 1 has not said that it left: the epoch would form around a corpse"
    assert pipeline.members.gone(1, "exit", pipeline.now_ns) == [StageDied(1, 1, "exit")]
    pipeline.tick(1)
    assert pipeline.forms() == {}


def test_after_a_broken_transport_alone_the_same_stages_form_again() -> None:
    pipeline = MembersRig(2)
    pipeline.start()
    pipeline.say(0, wire.Broken(1, "reset"))
    assert pipeline.say(1, wire.Broken(1, "reset")) == [], "one loss, one event"
    assert pipeline.say(1, wire.Broken(1, "reset")) == [], "what is said twice is heard once"
    assert pipeline.tick(0.05) == []
    assert not any(isinstance(m, wire.Form) for _, m in pipeline.sent), "a broken wire is not tried in a hot loop"
    pipeline.tick(0.5)
    assert pipeline.join() == [Formed(2, 10)]


def test_a_second_loss_while_forming_ends_that_epoch_too() -> None:
    pipeline = MembersRig(3)
    pipeline.start()
    pipeline.members.gone(0, "exit", pipeline.now_ns)
    pipeline.leave(1, 2)
    pipeline.hello(0)
    pipeline.loaded(0)
    pipeline.tick(1)
    pipeline.say(0, wire.StoreOpened(2, 4002))
    assert pipeline.forms()
    pipeline.say(1, wire.Ready(2))
    assert pipeline.members.gone(2, "exit", pipeline.now_ns) == [StageDied(2, 2, "exit")], "nothing was in flight"
    assert pipeline.leave(0, 1) == []
    assert pipeline.say(0, wire.Ready(2)) == [], "a late word of the epoch that never was"
    pipeline.hello(2)
    pipeline.loaded(2)
    pipeline.tick(1)
    assert pipeline.join() == [Formed(3, 10)]


@pytest.mark.parametrize(("formed", "patience_s"), [(True, 25), (False, 2)])
def test_a_survivor_that_cannot_leave_is_replaced(formed: bool, patience_s: int) -> None:
    pipeline = MembersRig(3)
    if formed:
        pipeline.start()
    else:
        for stage in range(3):
            pipeline.hello(stage)
        for stage in range(3):
            pipeline.loaded(stage)
        pipeline.say(0, wire.StoreOpened(1, 4001))
    pipeline.members.gone(2, "exit", pipeline.now_ns)
    pipeline.say(0, wire.Broken(1, "told"))
    for _ in range(2 * patience_s):
        pipeline.tick(0.5)
        pipeline.say(0, wire.Heartbeat(pipeline.now_ns, pipeline.now_ns))
        pipeline.say(1, wire.Heartbeat(pipeline.now_ns, pipeline.now_ns))
        assert pipeline.dropped == []
    pipeline.tick(0.5)
    assert pipeline.dropped == [(1, "stuck")]


def test_a_death_while_forming_starts_over() -> None:
    pipeline = MembersRig(2)
    pipeline.hello(0)
    pipeline.hello(1)
    pipeline.loaded(0)
    pipeline.loaded(1)
    assert pipeline.members.all[0].state is StageState.FORMING
    pipeline.members.gone(1, "exit", pipeline.now_ns)
    pipeline.leave(0)
    pipeline.hello(1)
    pipeline.loaded(1)
    pipeline.tick(1)
    assert pipeline.members.epoch == 2
    assert pipeline.join() == [Formed(2, 10)]


def test_messages_of_an_old_epoch_are_ignored() -> None:
    pipeline = MembersRig(2)
    pipeline.start()
    pipeline.members.gone(1, "exit", pipeline.now_ns)
    pipeline.leave(0)
    pipeline.hello(1)
    pipeline.loaded(1)
    pipeline.tick(1)
    assert pipeline.say(0, wire.Ready(1)) == []
    assert pipeline.say(0, wire.Broken(1, "old")) == []
    assert pipeline.say(0, wire.StoreOpened(1, 1)) == []
    assert pipeline.join() == [Formed(2, 10)]


def answer(pipeline: MembersRig, *stages: int) -> None:
    for stage in stages:
        pipeline.say(stage, wire.Heartbeat(pipeline.now_ns, pipeline.now_ns))


def test_a_pause_of_the_head_is_nobodys_fault() -> None:
    pipeline = MembersRig(2)
    pipeline.start()
    assert pipeline.tick(5) == []
    assert pipeline.members.formed
    for _ in range(22):
        pipeline.tick(0.5)
    assert {stage for stage, _ in pipeline.dropped} == {0, 1}, "those who then stay silent are dropped"


@pytest.mark.parametrize("silent_s", [3, 6, 9])
def test_a_pause_of_a_stage_costs_an_epoch_and_no_loading(silent_s: int) -> None:
    pipeline = MembersRig(2)
    pipeline.start()
    events: list[MemberEvent] = []
    for _ in range(2 * silent_s):
        answer(pipeline, 0)
        events += pipeline.tick(0.5)
    assert events == [EpochLost(1, "stage 1: silent", None)]
    assert pipeline.dropped == []
    pipeline.sent.clear()
    for stage in range(2):
        assert pipeline.say(stage, wire.Broken(1, "told")) == []
    pipeline.tick(0.5)
    assert pipeline.join() == [Formed(2, 10)]
    assert [member.restarts for member in pipeline.members.all] == [0, 0]


def test_a_silent_stage_is_noticed_within_three_seconds_and_cut_off_after_ten() -> None:
    pipeline = MembersRig(2)
    pipeline.start()
    began_ns, lost_ns = pipeline.now_ns, 0
    while not pipeline.dropped:
        answer(pipeline, 0)
        if pipeline.tick(0.1):
            lost_ns = lost_ns or pipeline.now_ns
            pipeline.say(0, wire.Broken(1, "told"))
        assert pipeline.forms() == {}, "no epoch forms with a stage that is silent"
    assert 2 * SECOND < lost_ns - began_ns <= 3 * SECOND
    assert 10 * SECOND < pipeline.now_ns - began_ns < 11 * SECOND
    assert [stage for stage, _ in pipeline.dropped] == [1]
    assert not pipeline.members.healthy(pipeline.now_ns)


def test_a_stage_that_stays_away_is_hopeless() -> None:
    pipeline = MembersRig(2)
    pipeline.start()
    pipeline.members.gone(1, "exit", pipeline.now_ns)
    pipeline.say(0, wire.Heartbeat(pipeline.now_ns, pipeline.now_ns))
    answer(pipeline, 0)
    assert pipeline.tick(300) == [], "a host may need minutes"
    (event,) = pipeline.tick(301)
    assert event == Hopeless("stage 1 did not come back in time", usage=False)


def test_a_drain_does_not_wait_for_a_stage_whose_keeper_died_too() -> None:
    pipeline = MembersRig(2)
    pipeline.start()
    pipeline.members.draining = True
    pipeline.members.gone(1, "exit", pipeline.now_ns)
    assert pipeline.tick(9) == []
    (event,) = pipeline.tick(2)
    assert isinstance(event, Hopeless)


def test_mistakes_before_the_first_epoch_are_the_operators() -> None:
    pipeline = MembersRig(1, mistake=ConfigError("--layers", "no"))
    assert pipeline.hello(0) == [Hopeless("--layers: no", usage=True)]
    assert pipeline.say(0, wire.GaveUp("bad file")) == [Hopeless("bad file", usage=True)]


def test_another_model_after_a_restart_is_refused() -> None:
    pipeline = MembersRig(2)
    pipeline.start()
    pipeline.members.gone(1, "exit", pipeline.now_ns)
    other = Architecture(6, 64, 4, 128, 300, 300, 256)
    (event,) = pipeline.hello(1, arch=other)
    assert isinstance(event, Hopeless)


# ---- nothing is tried for ever ------------------------------------------------------------------------------


def fail_to_form(pipeline: MembersRig, complainer: int) -> list[MemberEvent]:
    """An epoch that one stage's transport keeps from forming; both leave it."""
    pipeline.tick(21)
    epoch = pipeline.members.epoch
    pipeline.say(0, wire.StoreOpened(epoch, 4000))
    events = pipeline.say(complainer, wire.Broken(epoch, "no route to host"))
    return events + pipeline.say(1 - complainer, wire.Broken(epoch, "told"))


def loaded_pipeline() -> MembersRig:
    pipeline = MembersRig(2)
    for stage in range(2):
        pipeline.hello(stage)
    for stage in range(2):
        pipeline.loaded(stage)
    return pipeline


def test_a_stage_that_keeps_epochs_from_forming_is_replaced_at_the_third() -> None:
    pipeline = loaded_pipeline()
    for _ in range(2):
        assert fail_to_form(pipeline, 1) == []
        assert pipeline.dropped == []
    fail_to_form(pipeline, 1)
    assert pipeline.dropped == [(1, "forming")]


def test_after_ten_epochs_that_did_not_form_the_server_ends_with_the_reason() -> None:
    pipeline, events = loaded_pipeline(), list[MemberEvent]()
    for attempt in range(10):
        assert events == [], f"after {attempt}"
        events = fail_to_form(pipeline, attempt % 2)
        for stage, cause in pipeline.dropped:
            assert cause == "forming"
            pipeline.members.gone(stage, cause, pipeline.now_ns)
            pipeline.hello(stage)
            pipeline.loaded(stage)
        pipeline.dropped.clear()
    reason = "the pipeline did not form in 10 attempts; the last one: no route to host"
    assert events == [Hopeless(reason, usage=False)]


def test_an_epoch_that_forms_ends_the_count() -> None:
    pipeline = loaded_pipeline()
    for _ in range(5):
        for _ in range(2):
            assert fail_to_form(pipeline, 1) == []
        pipeline.sent.clear()
        pipeline.tick(1)
        assert pipeline.join() == [Formed(pipeline.members.epoch, 10)]
        for stage in range(2):
            pipeline.say(stage, wire.Broken(pipeline.members.epoch, "reset"))
    assert pipeline.dropped == []


def test_deaths_between_epochs_are_no_attempts() -> None:
    """A keeper counts those; the head waits for the stage."""
    pipeline = MembersRig(2)
    pipeline.start()
    for _ in range(20):
        events = pipeline.members.gone(1, "exit", pipeline.now_ns)
        assert not any(isinstance(event, Hopeless) for event in events)
        pipeline.hello(1)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gpu": 0}, "stage 1 came back with a GPU instead of a CPU"),
        ({"dtype": "bfloat16"}, "stage 1 came back with dtype bfloat16 instead of float32"),
        ({"quantization": "int8"}, "stage 1 came back with quantization int8 instead of none"),
        ({"kv_dtype": "int8"}, "stage 1 came back with kv-dtype int8 instead of float32"),
        ({"host": "elsewhere"}, "stage 1 came back with another machine, elsewhere instead of same name"),
        ({"architecture": Architecture(6, 64, 4, 128, 300, 300, 256)}, "stage 1 came back with another model"),
        ({"machine": "started anew"}, None),
        ({}, None),
    ],
)
def test_a_stage_that_comes_back_different_is_refused(changes: dict[str, object], named: str | None) -> None:
    pipeline = MembersRig(2)
    pipeline.start()
    before = pipeline.members[1].hello
    assert before is not None
    pipeline.members.gone(1, "exit", pipeline.now_ns)
    events = pipeline.say(1, msgspec.structs.replace(before, **changes))
    assert events == ([] if named is None else [Hopeless(named, usage=True)])


def test_clocks_of_other_hosts_are_aligned_by_the_quickest_round_trip() -> None:
    pipeline = MembersRig(2)
    pipeline.hello(0)
    pipeline.hello(1, machine="there")
    for stage in range(2):
        pipeline.loaded(stage)
    pipeline.join()
    ahead_ns = 5_000_000_000
    for rtt_ns in (4_000_000, 200_000, 9_000_000):
        sent_ns = pipeline.now_ns
        pipeline.now_ns += rtt_ns
        pipeline.say(1, wire.Heartbeat(sent_ns, sent_ns + rtt_ns // 2 + ahead_ns + rtt_ns // 50))
    stamps = StepStamps(*[ahead_ns + t for t in range(6)])
    (done,) = pipeline.say(1, wire.Result(StepResult(1, 1, 1, stamps)))
    assert isinstance(done, StepResult)
    assert abs(done.stamps.planned) <= 4_000, "off by at most the quickest trip's asymmetry"


def test_old_round_trips_are_forgotten_so_that_a_drifting_clock_stays_aligned() -> None:
    pipeline = MembersRig(2)
    pipeline.hello(0)
    pipeline.hello(1, machine="there")
    for minute in range(10):
        for _ in range(120):
            pipeline.now_ns += SECOND // 2
            drift_ns = 50 * pipeline.now_ns // 1_000_000  # 50 ppm
            # The best round trips of all are those of the first minute.
            rtt_ns = 100_000 if minute == 0 else 300_000
            sent_ns = pipeline.now_ns - rtt_ns
            pipeline.say(1, wire.Heartbeat(sent_ns, sent_ns + rtt_ns // 2 + drift_ns))
        assert abs(pipeline.members[1].clock_offset_ns - drift_ns) < 1_000_000


MOVES = {
    ("ABSENT", "ABSENT"), ("ABSENT", "LOADING"),
    ("LOADING", "ABSENT"), ("LOADING", "LOADED"),
    ("LOADED", "ABSENT"), ("LOADED", "FORMING"),
    ("FORMING", "ABSENT"), ("FORMING", "READY"), ("FORMING", "LEAVING"), ("FORMING", "LOADED"),
    ("READY", "ABSENT"), ("READY", "LEAVING"), ("READY", "LOADED"),
    ("LEAVING", "ABSENT"), ("LEAVING", "LOADED"),
}  # fmt: skip


@pytest.mark.parametrize("before", StageState)
@pytest.mark.parametrize("after", StageState)
def test_a_rank_moves_as_the_table_says_and_not_otherwise(before: StageState, after: StageState) -> None:
    member = Member(3, 1, state=before, since_ns=1)
    if (before.name, after.name) in MOVES:
        moved = member.moved(after, 7)
        assert (moved.state, moved.since_ns, moved.rank) == (after, 7, 3)
    else:
        with pytest.raises(InvalidMove, match=f"rank 3 is {before.name} and cannot become {after.name}"):
            member.moved(after, 7)


def test_a_message_at_the_wrong_time_ends_the_connection_and_changes_nothing() -> None:
    pipeline = MembersRig(2)
    assert pipeline.loaded(0) == [], "it has not even greeted"
    assert pipeline.dropped == [(0, "protocol")]
    assert pipeline.members[0].state is StageState.ABSENT
    assert pipeline.members[0].loaded is None
    pipeline.start()
    assert pipeline.hello(1) == [], "a second greeting on the same connection"
    assert pipeline.dropped[1:] == [(1, "protocol")]
    assert pipeline.members.formed, "the epoch is lost when the connection is gone, not before"
    assert pipeline.members.gone(1, "protocol", pipeline.now_ns)[1] == EpochLost(1, "stage 1: protocol", 1)


def test_weights_that_are_loaded_twice_end_the_connection_and_not_the_epoch() -> None:
    pipeline = loaded_pipeline()
    pipeline.say(0, wire.StoreOpened(1, 4000))
    assert pipeline.members[1].state is StageState.FORMING
    assert pipeline.loaded(1) == []
    assert pipeline.dropped == [(1, "protocol")]
    assert pipeline.members[1].state is StageState.FORMING, "else it would wait for ever, and the others for it"


def test_a_rank_cannot_report_another_stages_step() -> None:
    pipeline = MembersRig(2)
    pipeline.start()
    assert pipeline.say(1, result(1)) == [], "the result names stage 0"
    assert len(pipeline.say(0, result(1))) == 1


def test_tensor_ranks_load_the_same_stage_and_the_epoch_has_all_of_them() -> None:
    """Four ranks of the second of two replicas, two for each of two stages."""
    rig = MembersRig(2)
    grid = RankGrid(2, 2, 2)
    rig.members = members = Members(grid, "here", rig, rig, replica=1)
    ranks = (2, 3, 6, 7)
    assert members.ranks == ranks
    assert [(member.stage, member.tensor) for member in members.all] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    members.start(0)
    about = (8, "h", "/m", ARCH, "float32", None, False, None, "here", "10.0.0.1", "10.0.0.1")
    for rank in ranks:
        rig.say(rank, wire.Hello(rank, *about))
    layouts = {rank: message.layout for rank, message in rig.sent if isinstance(message, wire.Assign)}
    assert [layouts[rank].place for rank in ranks] == [0, 1, 2, 3]
    assert layouts[7] == replace(layouts[6], tensor=1)
    assert (layouts[6].stage, layouts[6].num_tensor, layouts[6].num_places) == (1, 2, 4)
    for rank in ranks:
        rig.say(rank, wire.Loaded("cpu", 1, 1, 100, 1000, ""))
    assert list(rig.forms()) == [2]
    rig.say(2, wire.StoreOpened(1, 1))
    assert list(rig.forms()) == [3, 6, 7]
    formed = [event for rank in ranks for event in rig.say(rank, wire.Ready(1))]
    assert formed == [Formed(1, 10)]
    died, lost = members.gone(7, "exit", rig.now_ns)
    assert (died, lost) == (StageDied(7, 1, "exit"), EpochLost(1, "replica 1 stage 1 tensor 1: exit", 1))
    left = {rank for rank, message in rig.sent if isinstance(message, wire.Abandon)}
    assert left == {2, 3, 6}, "the others keep their weights"
