"""The replica: plans out, results in, slow stages and lost ones. Time and ranks are scripted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from ppserve import wire
from ppserve.core.grid import RankGrid
from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.steps import STEP_DEADLINE_NS, Step
from ppserve.core.plan import SPECULATIVE, Drawn, StepPlan, StepResult, StepStamps
from ppserve.core.request import FinishReason, Request, SamplingParams, StopConditions
from ppserve.core.scheduling.quarantine import PROBE
from ppserve.core.scheduling.sequence import SequenceEvent
from ppserve.core.telling import DrawMemory, Told
from ppserve.errors import Draining
from ppserve.head.engine.control import Gone, Heard
from ppserve.head.engine.fleet import Fleet
from ppserve.head.engine.member import Formed, Hopeless
from ppserve.head.engine.members import Members
from ppserve.head.engine.replica import Replica, ReplicaEvent
from ppserve.head.engine.watcher import Watcher
from tests.core.scheduling.rig import prompt_of
from tests.head.engine.toy_ranks import ARCH, NUM_BLOCKS, ToyRules

SECOND = 1_000_000_000
MS = 1_000_000


@dataclass
class ScriptedControl:
    """A control plane that only remembers what was sent and which ranks were dropped."""

    sent: list[tuple[int, wire.FromHead]] = field(default_factory=list)
    dropped: list[tuple[int, str]] = field(default_factory=list)

    def poll(self, timeout_s: float) -> list[Heard | Gone]:
        raise AssertionError("the engine polls, not the replica")

    def wake(self) -> None:
        raise AssertionError("nobody waits")

    def close(self, goodbye_s: float) -> None:
        raise AssertionError("the engine closes, not the replica")

    def send(self, rank: int, message: wire.FromHead) -> None:
        self.sent.append((rank, message))

    def broadcast(self, ranks: Iterable[int], message: wire.FromHead) -> None:
        for rank in ranks:
            self.send(rank, message)

    def drop(self, rank: int, cause: str) -> None:
        self.dropped.append((rank, cause))


class Notes(Watcher):
    """The callbacks, in order."""

    def __init__(self) -> None:
        self.called: list[tuple[object, ...]] = []

    def dispatched(self, step: Step) -> None:
        self.called.append(("dispatched", step.plan.step_id))

    def reported(self, step: Step, stage: int) -> None:
        self.called.append(("reported", step.plan.step_id, stage))

    def epoch_lost(self) -> None:
        self.called.append(("epoch lost",))

    def stage_died(self, stage: int, cause: str) -> None:
        self.called.append(("died", stage, cause))


class Rig:
    """The second of two replicas, so ranks are not stages. Its time, ranks and stages are the test's."""

    def __init__(self, num_stages: int = 2, num_tensor: int = 1, **config: Any) -> None:
        self.now_ns = SECOND
        self.grid = RankGrid(num_tensor, 2, num_stages)
        self.ranks = self.grid.ranks_of(1)
        self.control = ScriptedControl()
        self.notes = Notes()
        members = Members(self.grid, "here", ToyRules(num_stages, config), self.control, replica=1)
        self.replica = Replica(members, self.control, self.notes, lambda: self.now_ns)
        self.fleet = Fleet((self.replica,), self.control, lambda: self.now_ns)
        self.fleet.start()

    def say(self, rank: int, message: wire.FromStage) -> list[ReplicaEvent]:
        return self.fleet.take(Heard(rank, self.now_ns, message))

    def greet(self, rank: int, why_not: str = "") -> None:
        """A stage process of this rank connects and loads its weights. why_not: what its self-test found."""
        about = (self.grid.size, "host", "/m", ARCH, "float32", None, False, None, "here")
        self.say(rank, wire.Hello(rank, *about))
        self.say(rank, wire.Loaded("cpu", 1, 1, 10, 10 * NUM_BLOCKS, why_not))

    def join(self) -> list[ReplicaEvent]:
        """All ranks join the epoch that the first was invited to."""
        self.draws = DrawMemory()
        epoch = self.replica.members.epoch
        self.say(self.ranks[0], wire.StoreOpened(epoch, 1))
        return [event for rank in self.ranks for event in self.say(rank, wire.Ready(epoch))]

    def form(self, why_not: str = "") -> list[ReplicaEvent]:
        """The first epoch."""
        for rank in self.ranks:
            self.greet(rank, why_not)
        return self.join()

    def submit(self, *names: str, num_prompt: int = 4, max_tokens: int = 6) -> None:
        for name in names:
            stop = StopConditions(max_tokens, ignore_eos=True)
            self.fleet.submit(Request(name, prompt_of(num_prompt, len(name)), stop, SamplingParams()))
        self.fleet.demand(True)

    def refill(self) -> list[StepPlan]:
        """The plans of a turn; every rank was sent each of them, in order, the last one with long draws."""
        self.control.sent.clear()
        self.fleet.refill(self.now_ns)
        sent = {rank: [m for r, m in self.control.sent if r == rank and isinstance(m, wire.Plan)]
                for rank in self.ranks}  # fmt: skip
        assert all([m.plan for m in sent[rank]] == [m.plan for m in sent[self.ranks[0]]] for rank in self.ranks)
        assert all(m.told == Told() for rank in self.ranks[:-1] for m in sent[rank])
        return [self.draws.restore(m.plan, m.told) for m in sent[self.ranks[-1]]]

    def result(self, plan: StepPlan, stage: int, compute_ns: int = MS) -> wire.Result:
        """A stage's result of a step that it computed until now."""
        begun = self.now_ns - compute_ns
        stamps = StepStamps(begun, begun, begun, begun, self.now_ns, self.now_ns)
        is_last = stage // self.grid.tensor == self.grid.pipeline - 1
        drawn = tuple(Drawn(piece.sequence_id, 3) for piece in plan.slices if piece.draw and is_last)
        return wire.Result(StepResult(plan.epoch, plan.step_id, stage, stamps, 0, drawn))

    def compute(self, plan: StepPlan) -> list[ReplicaEvent]:
        """Every stage takes a millisecond for the step."""
        events: list[ReplicaEvent] = []
        for stage, rank in enumerate(self.ranks):
            self.now_ns += MS
            events += self.say(rank, self.result(plan, stage))
        return events

    def wait(self, seconds: float, *, silent: tuple[int, ...] = ()) -> list[ReplicaEvent]:
        """Ticks every half second. All ranks but the silent ones answer pings meanwhile."""
        events: list[ReplicaEvent] = []
        for _ in range(round(2 * seconds)):
            self.now_ns += SECOND // 2
            for rank in self.ranks:
                if rank not in silent:
                    self.say(rank, wire.Heartbeat(self.now_ns, self.now_ns))
            events += self.fleet.tick()
        return events

    def lose(self, rank: int, cause: str = "exit") -> list[ReplicaEvent]:
        """A rank's process dies; the others leave the epoch."""
        epoch = self.replica.members.epoch
        events = self.fleet.take(Gone(rank, cause))
        for other in self.ranks:
            if other != rank:
                events += self.say(other, wire.Broken(epoch, "told"))
        return events

    def convicts(self, rank: int, pause_s: int = 0, cause: str = "exit") -> bool:
        """This rank's process dies, after the head has stood still, and comes back: whether a request fails."""
        for plan in self.refill():
            if plan.slices == (PROBE,):
                self.compute(plan)
                self.refill()
        self.now_ns += pause_s * SECOND
        self.lose(rank, cause)
        self.greet(rank)
        self.wait(1)
        return any(isinstance(event, SequenceEvent) and event.error is not None for event in self.join())

    def times(self) -> tuple[StageTimes, ...]:
        return tuple(stage.times for stage in self.replica.reading(self.now_ns).stages)


def formed(num_stages: int = 2, num_tensor: int = 1, **config: Any) -> Rig:
    rig = Rig(num_stages, num_tensor, **config)
    assert rig.form() == [Formed(1, NUM_BLOCKS)]
    return rig


def finished(events: list[ReplicaEvent]) -> list[str]:
    """Requests that ended by themselves."""
    return [event.request_id for event in events if isinstance(event, SequenceEvent) and event.finish is not None]


# ---- lanes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_as_many_steps_are_in_flight_as_there_are_lanes(num_stages: int) -> None:
    rig = formed(num_stages, microbatches=num_stages, prefill_chunk=4)
    assert rig.refill() == [], "nothing is ready"
    rig.submit(*(f"r{i}" for i in range(3 * num_stages)))
    plans = rig.refill()
    assert [plan.lane for plan in plans] == list(range(num_stages))
    assert rig.refill() == [], "all lanes are taken"
    rig.compute(plans[0])
    (following,) = rig.refill()
    assert following.lane == plans[0].lane
    assert rig.notes.called[0] == ("dispatched", plans[0].step_id)
    assert ("reported", plans[0].step_id, num_stages - 1) in rig.notes.called


def test_a_step_is_committed_when_the_last_stage_reports_it_whoever_else_owes_it() -> None:
    rig = formed(microbatches=1)
    rig.submit("a", max_tokens=1)
    (plan,) = rig.refill()
    assert finished(rig.say(3, rig.result(plan, 1))) == ["a"]
    assert rig.fleet.demand(exists=False), "stage 0 has not reported: the server has work"
    assert rig.say(1, rig.result(plan, 0)) == []
    assert not rig.fleet.demand(exists=False)


def test_the_next_plan_is_sent_before_a_result_is_accounted_for_and_no_reading_lacks_it() -> None:
    rig = formed(microbatches=1)
    rig.submit("a")
    (plan,) = rig.refill()
    rig.compute(plan)
    reported = ("reported", plan.step_id, 1)
    assert reported not in rig.notes.called
    (following,) = rig.refill()
    assert rig.notes.called[-2:] == [reported, ("dispatched", following.step_id)]
    rig.compute(following)
    assert [stage.steps for stage in rig.replica.reading(rig.now_ns).stages] == [2, 2]
    (last,) = rig.refill()
    before = rig.replica.busy_s()
    rig.compute(last)
    assert [now - then for now, then in zip(rig.replica.busy_s(), before, strict=True)] == [0.001, 0.001]


def test_the_last_result_is_accounted_for_before_the_pipeline_is_idle() -> None:
    rig = formed(microbatches=1)
    rig.submit("a", max_tokens=1)
    (plan,) = rig.refill()
    rig.compute(plan)
    assert not rig.fleet.demand(exists=False)
    assert rig.notes.called[-1] == ("reported", plan.step_id, 1)


# ---- guesses ------------------------------------------------------------------------------------------


def repeats(rig: Rig) -> None:
    """Submits a prompt of one token several times, which is guessed to follow again."""
    rig.fleet.submit(Request("r", (5,) * 6, StopConditions(6, ignore_eos=True), SamplingParams()))
    rig.fleet.demand(True)


def test_every_rank_hears_at_once_of_a_step_that_is_doomed() -> None:
    rig = formed(speculate=1)
    repeats(rig)
    prompt, guessed = rig.refill()
    assert guessed.phase == SPECULATIVE
    rig.control.sent.clear()
    rig.compute(prompt)  # it draws token 3
    cancels = [(rank, message) for rank, message in rig.control.sent if isinstance(message, wire.Cancel)]
    assert cancels == [(rank, wire.Cancel((guessed.step_id,))) for rank in rig.ranks]


def test_every_rank_hears_of_steps_that_are_void_before_the_plan_of_the_request_for_which_they_make_way() -> None:
    rig = formed(4, speculate=1, max_num_seqs=2)
    for name, prompt, max_tokens in (("guessed", (3,) * 6, 9), ("short", (7, 8), 1), ("waiting", (1, 2), 1)):
        rig.fleet.submit(Request(name, prompt, StopConditions(max_tokens, ignore_eos=True), SamplingParams()))
    rig.fleet.demand(True)
    both, *guessed = rig.refill()
    assert [plan.phase for plan in guessed] == [SPECULATIVE] * 3
    assert finished(rig.compute(both)) == ["short"]
    (prompt_of_waiting,) = rig.refill()
    doomed = tuple(plan.step_id for plan in guessed[1:])
    for rank in rig.ranks:
        cancel, plan = (message for to, message in rig.control.sent if to == rank)
        assert cancel == wire.Cancel(doomed)
        assert isinstance(plan, wire.Plan)
        assert plan.plan.step_id == prompt_of_waiting.step_id


@pytest.mark.parametrize(("why_not", "num_steps"), [("", 2), ("rows differ", 1)])
def test_nothing_is_guessed_where_the_self_test_failed(
    why_not: str, num_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(speculate=1)
    rig.form(why_not)
    repeats(rig)
    assert len(rig.refill()) == num_steps
    assert ("nothing is guessed: rows differ" in caplog.text) == bool(why_not)


# ---- results that count for nothing -------------------------------------------------------------------


def test_a_result_of_an_unknown_step_or_a_repeated_one_is_ignored() -> None:
    rig = formed(microbatches=1)
    rig.submit("a")
    (plan,) = rig.refill()
    unknown = StepPlan(plan.epoch, 99, 0, plan.slices)
    assert rig.say(3, rig.result(unknown, 1)) == []
    assert rig.say(3, wire.Result(StepResult(0, plan.step_id, 1, StepStamps(1, 1, 1, 1, 1, 1)))) == []
    assert rig.say(3, rig.result(plan, 0)) == [], "of a stage that is not this rank's"
    assert rig.refill() == [], "the step is still in flight"
    (event,) = rig.say(3, rig.result(plan, 1))
    assert isinstance(event, SequenceEvent)
    assert event.token_id == 3
    assert rig.say(3, rig.result(plan, 1)) == []
    assert [call for call in rig.notes.called if call[0] == "reported"] == [("reported", plan.step_id, 1)]
    assert [stage.steps for stage in rig.replica.reading(rig.now_ns).stages] == [0, 1]


def test_a_result_of_a_lost_epoch_is_ignored_and_its_tokens_are_computed_again() -> None:
    rig = formed(microbatches=1)
    rig.submit("a", max_tokens=1)
    (plan,) = rig.refill()
    rig.lose(1)
    assert rig.say(3, rig.result(plan, 1)) == []
    rig.submit("bb", max_tokens=1)
    assert rig.refill() == [], "no plan is sent while there is no epoch"
    rig.now_ns += SECOND
    rig.greet(1)
    assert rig.join() == []
    assert rig.say(3, rig.result(plan, 1)) == [], "still of the lost epoch"
    (again,) = rig.refill()
    assert (again.epoch, again.slices[:1]) == (2, plan.slices)
    assert finished(rig.compute(again)) == ["a", "bb"]


# ---- a stage that does not report ---------------------------------------------------------------------


@pytest.mark.parametrize(("reported", "stuck"), [((), 1), ((0,), 3), ((0, 1), 5)])
def test_the_rank_that_owes_a_step_past_its_deadline_is_dropped(reported: tuple[int, ...], stuck: int) -> None:
    rig = formed(3, microbatches=1)
    rig.submit("a")
    (plan,) = rig.refill()
    for stage in reported:
        rig.say(rig.ranks[stage], rig.result(plan, stage))
    deadline_s = STEP_DEADLINE_NS / SECOND if not reported else 10  # a step is known to take a millisecond then
    assert rig.wait(deadline_s) == []
    assert rig.control.dropped == []
    rig.wait(1)
    assert set(rig.control.dropped) == {(stuck, "stuck")}


def test_a_pause_of_the_head_starts_the_deadline_anew() -> None:
    rig = formed(2)
    rig.submit("a")
    rig.refill()
    rig.wait(STEP_DEADLINE_NS / SECOND - 1)
    rig.now_ns += 2 * SECOND  # no tick meanwhile, and no message was read
    rig.fleet.tick()
    rig.wait(STEP_DEADLINE_NS / SECOND)
    assert rig.control.dropped == []
    rig.wait(1)
    assert set(rig.control.dropped) == {(1, "stuck")}


@pytest.mark.parametrize("pause_s", [0, 20])
def test_stages_that_end_while_the_head_stands_still_convict_nobody(pause_s: int) -> None:
    """They hear nothing of it. Without the pauses, as a control, the request in flight is convicted."""
    rig = formed(2)
    rig.submit("a")
    assert sum(rig.convicts(3, pause_s) for _ in range(5)) == (0 if pause_s else 1)


@pytest.mark.parametrize("other", [(1, "exit"), (0, "stuck")], ids=["rank", "cause"])
def test_who_is_alone_when_a_rank_ends_twice_in_the_same_way_is_convicted(other: tuple[int, str]) -> None:
    rig = formed(1, num_tensor=2)
    rig.submit("a")
    losses = [(0, "exit")] * 3 + [other, (0, "exit")]
    assert [rig.convicts(rig.ranks[tensor], 0, cause) for tensor, cause in losses] == [False] * 4 + [True]


def test_a_silent_rank_ends_the_epoch_long_before_its_step_is_overdue_and_is_cut_off_later() -> None:
    rig = formed(2)
    rig.submit("a")
    rig.refill()
    rig.wait(4, silent=(3,))
    assert (rig.replica.members.formed, rig.control.dropped) == (False, [])
    rig.wait(7, silent=(3,))
    assert {rank for rank, _ in rig.control.dropped} == {3}


# ---- starting and ending ------------------------------------------------------------------------------


def test_before_the_first_epoch_nothing_is_served() -> None:
    rig = Rig()
    with pytest.raises(Draining):
        rig.submit("a")
    with pytest.raises(Draining):
        rig.replica.reading(rig.now_ns)
    assert rig.refill() == []
    assert rig.fleet.abort("a", FinishReason.CANCELLED) == []
    rig.fleet.prove_idle()


@pytest.mark.parametrize(("draining", "patience_s"), [(False, 600), (True, 10)])
def test_a_lost_stage_is_waited_for_less_long_while_draining(draining: bool, patience_s: int) -> None:
    rig = formed()
    rig.submit("a")
    rig.refill()
    rig.replica.members.draining = draining
    assert rig.lose(3) == []
    assert rig.notes.called[-2:] == [("died", 1, "exit"), ("epoch lost",)]
    assert rig.wait(patience_s, silent=(3,)) == []
    (event, *_) = rig.wait(1, silent=(3,))
    assert isinstance(event, Hopeless)
    assert not event.usage


def test_a_block_that_is_held_without_work_is_noticed() -> None:
    rig = formed(microbatches=1)
    rig.submit("a", max_tokens=2)
    while plans := rig.refill():
        rig.fleet.prove_idle()  # says nothing while there is work
        rig.compute(plans[0])
    rig.fleet.prove_idle()
    assert rig.replica.scheduler is not None
    rig.replica.scheduler._blocks.try_allocate(99, 1)
    with pytest.raises(AssertionError, match="KV blocks are held"):
        rig.fleet.prove_idle()


# ---- the ledger ---------------------------------------------------------------------------------------


def test_time_without_demand_is_idle_and_time_without_a_stage_is_host() -> None:
    rig = formed(microbatches=1)
    rig.now_ns += 5 * SECOND  # idle
    rig.submit("a", max_tokens=1)
    (plan,) = rig.refill()
    rig.now_ns += MS
    rig.lose(1)
    rig.now_ns += 3 * SECOND  # down, and a request is open
    rig.greet(1)
    rig.join()
    (again,) = rig.refill()
    rig.compute(again)
    assert not rig.fleet.demand(exists=False)
    rig.now_ns += 7 * SECOND  # idle again
    for times in rig.times():
        assert times.wall_ns == rig.now_ns - SECOND
        assert times.idle_ns == 12 * SECOND
        assert times.busy_ns == {"prefill": MS, "decode": 0, "mixed": 0, "speculative": 0}
        assert times.bubble_ns["host"] >= 3 * SECOND
        assert times.demand_ns == 3 * SECOND + 3 * MS
    assert plan.epoch < again.epoch


def test_a_stage_lost_without_demand_leaves_idle_time_only() -> None:
    rig = formed()
    rig.now_ns += SECOND
    rig.lose(3)
    rig.now_ns += 2 * SECOND
    rig.greet(3)
    rig.join()
    rig.now_ns += SECOND
    assert [times.idle_ns for times in rig.times()] == [4 * SECOND] * 2
    assert [times.demand_ns for times in rig.times()] == [0, 0]
