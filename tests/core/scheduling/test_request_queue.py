"""Several schedulers behind one request queue: who computes what, also when a replica is lost or drained."""

from __future__ import annotations

import random

import pytest

from ppserve.core.request import FinishReason, SamplingParams
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.request_queue import RequestQueue
from ppserve.core.scheduling.sequence import SequenceEvent
from tests.core.scheduling.invariants import check_one_of_several, check_request_queue
from tests.core.scheduling.rig import SchedulerRig, a_request, fill
from tests.simulated_stage import EOS_ID


class Replicas:
    """Rigs with one request queue; what they tell comes together in the first."""

    def __init__(self, count: int = 2, num_stages: int = 1, num_blocks: int = 400, **config: object) -> None:
        self.request_queue = RequestQueue()
        settings = {"max_model_len": 1024, "block_size": 4, "eos_ids": (EOS_ID,), **config}
        configs = [SchedulerConfig(num_stages, replica=i, **settings) for i in range(count)]  # type: ignore[arg-type]
        self.rigs = [SchedulerRig(each, num_blocks, request_queue=self.request_queue) for each in configs]
        self.first = self.rigs[0]
        for rig in self.rigs[1:]:
            rig.events = self.first.events

    def submit(self, name: str, **fields: object) -> None:
        assert self.first.submit(a_request(name, **fields))  # type: ignore[arg-type]

    def at(self, replica: int) -> set[str]:
        """The requests that a replica computes."""
        return {sequence.request.id for sequence in self.rigs[replica].scheduler._running.values()}

    def turn(self) -> list[SequenceEvent]:
        """Every replica sends what it can, and gets one step back."""
        events: list[SequenceEvent] = []
        for rig in self.rigs:
            if rig.scheduler.is_open:
                fill(rig)
            if rig.pipeline.num_in_flight:
                events += rig.commit_one()
            self.check()
        return events

    def lose(self, replica: int, failed: frozenset[int] = frozenset({0})) -> list[SequenceEvent]:
        events = self.rigs[replica].lose(failed)
        self.check()
        return events

    def drain(self) -> None:
        while self.request_queue.groups:
            self.turn()
        for rig in self.rigs:
            while rig.pipeline.num_in_flight:
                rig.commit_one()
        self.check()

    def finish(self) -> None:
        self.drain()
        self.first.check_answers()

    def check(self) -> None:
        for rig in self.rigs:
            check_one_of_several(rig.scheduler)
        check_request_queue(self.request_queue, [rig.scheduler for rig in self.rigs])


# ---- where a request goes ---------------------------------------------------------------------------------


def test_a_request_goes_where_its_prefix_is_cached_unless_it_waits_longer_there() -> None:
    replicas = Replicas(2)
    replicas.submit("one", salt=1, num_prompt=16)
    replicas.submit("two", salt=2, num_prompt=16)
    assert (replicas.at(0), replicas.at(1)) == ({"one"}, {"two"})
    replicas.drain()
    replicas.submit("like two", salt=2, num_prompt=16)
    assert replicas.at(1) == {"like two"}
    replicas.submit("like one", salt=1, num_prompt=16, max_tokens=500)
    assert replicas.at(0) == {"like one"}
    replicas.drain()
    replicas.submit("one again", salt=1, num_prompt=16, max_tokens=500)
    replicas.turn()
    replicas.submit("like it", salt=1, num_prompt=16)
    assert replicas.at(1) == {"like it"}


def test_one_without_room_is_passed_over_and_the_first_that_fits_nowhere_holds_up_the_rest() -> None:
    replicas = Replicas(2, max_num_seqs=2)
    replicas.submit("two of two", num_sequences=2)
    replicas.submit("one", max_tokens=100)
    replicas.submit("three")
    assert (replicas.at(0), replicas.at(1)) == ({"two of two"}, {"one", "three"})
    replicas.submit("later", num_sequences=2)
    replicas.submit("last")
    assert replicas.request_queue.num_waiting == 2
    replicas.finish()


# ---- a replica is lost, or drained ------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 1])
def test_requests_of_a_lost_replica_go_on_at_another_before_all_that_wait(lost: int) -> None:
    replicas = Replicas(2, max_num_seqs=4)
    for number in range(4):
        replicas.submit(f"r{number}", max_tokens=12, num_sequences=2, salt=number % 2)
    replicas.submit("waits", num_sequences=2)
    for _ in range(5):
        replicas.turn()
    moved = replicas.at(lost)
    assert len(moved) == 2
    assert replicas.lose(lost) == []
    replicas.turn()
    assert replicas.at(lost) == set()
    assert replicas.request_queue.num_waiting == 3, "the other replica is full"
    replicas.rigs[lost].form()
    replicas.turn()
    assert replicas.at(lost) == moved, "before the one that had waited all the time"
    replicas.finish()


def test_requests_that_several_replicas_gave_back_go_on_in_the_order_of_their_admission() -> None:
    replicas = Replicas(2)
    for number in range(4):
        replicas.first.now = float(number)
        replicas.submit(f"r{number}", salt=number)
    assert (replicas.at(0), replicas.at(1)) == ({"r0", "r2"}, {"r1", "r3"})
    replicas.lose(1)
    replicas.lose(0)
    assert list(replicas.request_queue.queue._given_back) == ["r0", "r1", "r2", "r3"]
    for rig in replicas.rigs:
        rig.form()
    replicas.finish()


def test_what_is_in_flight_at_a_drained_replica_is_computed_again() -> None:
    replicas = Replicas(2, num_stages=2)
    for number in range(6):
        replicas.submit(f"r{number}", max_tokens=9, num_prompt=7)
    replicas.turn()
    rig = replicas.rigs[0]
    assert rig.schedule_one() is not None
    replicas.request_queue.give_back(rig.scheduler)
    while rig.pipeline.num_in_flight:
        assert rig.commit_one() == []
    assert (rig.scheduler.kv_usage, len(replicas.at(1))) == (0, 3)
    replicas.turn()
    assert len(replicas.at(1)) == 6
    replicas.finish()


def test_the_request_that_kills_is_convicted_across_replicas_and_nobody_else() -> None:
    poison, turns = "r2", 0
    replicas = Replicas(2)
    for number in range(6):
        replicas.submit(f"r{number}", max_tokens=30, sampling=SamplingParams(seed=number))
    convicted: list[str] = []
    tried_at: list[int] = []
    while replicas.request_queue.groups:
        turns += 1
        assert turns < 500
        for number, rig in enumerate(replicas.rigs):
            if not rig.scheduler.is_open:
                rig.form()
                continue
            fill(rig)
            if poison in {s.request.id for _, owned in rig.scheduler.slots._steps.values() for s, _ in owned}:
                tried_at += [number] * (replicas.request_queue.poison_isolation.lone == poison)
                convicted += [event.request_id for event in replicas.lose(number)]
            elif rig.pipeline.num_in_flight:
                rig.commit_one()
    assert convicted == [poison]
    assert len(tried_at) > 1
    assert len(set(tried_at)) == 1, "once it is suspected, it takes no second replica down"
    del replicas.first.requests[poison]
    replicas.first.check_answers()


def test_while_a_suspect_runs_alone_other_replicas_take_everybody_but_suspects() -> None:
    replicas = Replicas(2)
    replicas.lose(1)
    for name in "ab":
        replicas.submit(name, max_tokens=9)
    for _ in range(2):
        replicas.request_queue.admit(0.0)
        fill(replicas.first)
        replicas.lose(0)
        replicas.first.form()
    replicas.rigs[1].form()
    replicas.submit("new", max_tokens=9)
    replicas.turn()
    assert replicas.request_queue.poison_isolation.suspects == ["a", "b"]
    assert (replicas.at(0), replicas.at(1)) == ({"a"}, {"new"})
    replicas.finish()


def test_a_loss_elsewhere_neither_accuses_nor_clears() -> None:
    replicas = Replicas(3)
    for number in range(3):
        replicas.submit(f"r{number}", max_tokens=30)
    replicas.turn()
    for rig in replicas.rigs:
        fill(rig)
    replicas.lose(0)
    assert replicas.request_queue.poison_isolation.watches("r0")
    replicas.lose(2)
    assert replicas.request_queue.poison_isolation.lone is None
    replicas.request_queue.admit(0.0)
    assert replicas.at(1) == {"r0", "r1", "r2"}


@pytest.mark.parametrize("seed", range(12))
def test_a_walk(seed: int) -> None:
    """Requests, losses, drains and ends at random; every answer is what it is alone."""
    chance = random.Random(seed)
    count, num_stages = chance.choice((2, 3)), chance.choice((1, 2))
    replicas = Replicas(
        count, num_stages=num_stages, num_blocks=chance.choice((40, 200)),
        max_num_seqs=chance.choice((2, 6)), max_queue=100, speculate=chance.choice((0, 2)),
            runs_ahead=num_stages == 1 and seed % 2 == 0,
    )  # fmt: skip
    for number in range(40):
        fields = {"num_prompt": chance.randint(1, 30), "max_tokens": chance.randint(1, 20), "salt": number % 3}
        fields |= {"num_sequences": chance.choice((1, 1, 2)), "caller": chance.choice("ab")}
        replicas.submit(f"r{number}", **fields)
        for _ in range(chance.randint(0, 4)):
            replicas.turn()
        replica = chance.randrange(len(replicas.rigs))
        if not replicas.rigs[replica].scheduler.is_open:
            replicas.rigs[replica].form()
        elif chance.random() < 0.2:
            replicas.lose(replica, frozenset())
        if chance.random() < 0.05:
            replicas.first.tell(replicas.request_queue.abort(f"r{number}", FinishReason.CANCELLED))
    for rig in replicas.rigs:
        if not rig.scheduler.is_open:
            rig.form()
    replicas.finish()
