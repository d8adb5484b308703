"""A replica is restarted while the other serves, in the simulated world and without any fault."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from ppserve.core.request import Request, SamplingParams, StopConditions
from ppserve.errors import InvalidRequest
from tests.core.scheduling.rig import prompt_of
from tests.head.engine.history import Caller, History
from tests.head.engine.simulated_world import SECOND


class Calm(History):
    """Nothing goes wrong but what the test wants."""

    def __init__(self, num_replicas: int, formed: bool = True) -> None:
        super().__init__(3, num_replicas=num_replicas)
        self.engine.begin()
        self._tick()
        if formed:
            self.until(self.engine.formed)

    def until(self, done: Future[None]) -> None:
        while not done.done():
            self._step(60.0)

    def ask(self, count: int) -> list[Caller]:
        for number in range(count):
            stop = StopConditions(60, ignore_eos=True)
            self._submit(Request(f"r{number}", prompt_of(9, number), stop, SamplingParams(seed=number)))
        return self.callers

    def wait(self, seconds: float) -> None:
        until_ns = self.world.now_ns + int(seconds * SECOND)
        while self.world.now_ns < until_ns:
            self.world.step()


def test_streams_go_on_at_once_and_every_process_is_replaced_once() -> None:
    history = Calm(2)
    callers = history.ask(6)
    history.wait(0.05)
    before = [member for members in history.members for member in members.all]
    assert history.replicas[1].scheduler is not None
    assert history.replicas[1].scheduler.num_running == 3
    done = history.engine.restart(1, pauses=False)
    while not all(caller.is_over for caller in callers):
        history._step(60.0)
    assert not done.done(), "streams did not wait for it"
    history.until(done)
    done.result()
    after = [member for members in history.members for member in members.all]
    added = [now.restarts - then.restarts for now, then in zip(after, before, strict=True)]
    assert added == [0] * history.num_stages + [1] * history.num_stages
    assert [members.epoch for members in history.members] == [1, 2]
    history._check_the_end()
    history.ask(2)
    history.wait(0.05)
    assert [replica.scheduler and replica.scheduler.num_running for replica in history.replicas] == [1, 1]


def test_the_only_replica_is_restarted_only_when_its_streams_may_wait() -> None:
    history = Calm(1)
    callers = history.ask(3)
    history.wait(0.05)
    with pytest.raises(InvalidRequest, match="no other replica serves"):
        refused(history, 0)
    done = history.engine.restart(0, pauses=True)
    history.until(done)
    while not all(caller.is_over for caller in callers):
        history._step(60.0)
    history._check_the_end()


def test_a_replica_that_has_not_formed_yet_is_restarted_as_well() -> None:
    history = Calm(2, formed=False)
    assert not any(members.epoch for members in history.members)
    done = history.engine.restart(1, pauses=True)
    history.wait(60.0)
    assert done.done()
    done.result()
    assert history.engine.formed.done()


def test_what_is_refused() -> None:
    history = Calm(2)
    with pytest.raises(InvalidRequest, match="there is no replica 2"):
        refused(history, 2)
    done = history.engine.restart(0, pauses=False)
    with pytest.raises(InvalidRequest, match="replica 0 is being restarted"):
        refused(history, 1)
    history.until(done)


def refused(history: Calm, replica: int) -> None:
    asked = history.engine.restart(replica, pauses=False)
    history.until(asked)
    asked.result()
