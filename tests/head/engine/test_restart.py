"""A replica is restarted while the other serves, in the simulated world and without any fault."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import pytest

from ppserve.core.request import Request, SamplingParams, StopConditions
from ppserve.errors import InvalidRequest
from tests.core.scheduling.rig import prompt_of
from tests.head.engine.history import History
from tests.head.engine.scripted import SECOND

T = TypeVar("T")


class Calm(History):
    """Nothing goes wrong but what the test wants."""

    def __init__(self, num_replicas: int, formed: bool = True) -> None:
        super().__init__(1 + num_replicas)  # a seed with as many
        self._tick()
        if formed:
            self.wait_for(self.engine.formed)

    def wait_for(self, done: Future[T]) -> T:
        """Its result, or its error."""
        self.wait_until(done.done)
        return done.result()

    def restart(self, replica: int, pauses: bool = False) -> Callable[[], bool]:
        """Returns what says whether the replica serves again."""
        epoch = self.wait_for(self.engine.restart(replica, pauses))
        return lambda: self.wait_for(self.engine.serves_after(replica, epoch))

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self._step(60.0)

    def ask(self, count: int) -> None:
        """Sends so many requests, and returns when they are computed."""
        for number in range(count):
            stop = StopConditions(60, ignore_eos=True)
            self._submit(Request(f"r{number}", prompt_of(9, number), stop, SamplingParams(seed=number)))
        until_ns = self.world.now_ns + SECOND // 20
        self.wait_until(lambda: self.world.now_ns >= until_ns)

    def finish(self) -> None:
        self.wait_until(lambda: all(caller.is_over for caller in self.callers))

    @property
    def num_running(self) -> list[int]:
        return [replica.scheduler.num_running for replica in self.replicas if replica.scheduler is not None]


def test_streams_go_on_at_once_and_every_process_is_replaced_once() -> None:
    history = Calm(2)
    history.ask(6)
    assert history.num_running == [3, 3]
    before = [member for members in history.members for member in members.all]
    done = history.restart(1)
    history.finish()
    assert not done(), "streams did not wait for it"
    history.wait_until(done)
    after = [member for members in history.members for member in members.all]
    added = [now.restarts - then.restarts for now, then in zip(after, before, strict=True)]
    assert added == [0] * history.num_stages + [1] * history.num_stages
    assert [members.epoch for members in history.members] == [1, 2]
    history._check_the_end()
    history.ask(2)
    assert history.num_running == [1, 1]


def test_the_only_replica_is_restarted_only_when_its_streams_may_wait() -> None:
    history = Calm(1)
    history.ask(3)
    with pytest.raises(InvalidRequest, match="no other replica serves"):
        history.restart(0)
    history.wait_until(history.restart(0, pauses=True))
    history.finish()
    history._check_the_end()


def test_what_is_refused_and_that_a_replica_need_not_have_formed() -> None:
    history = Calm(2, formed=False)
    history.wait_until(history.restart(1, pauses=True))
    history.wait_for(history.engine.formed)
    with pytest.raises(InvalidRequest, match="there is no replica 2"):
        history.restart(2)
    done = history.restart(0)
    with pytest.raises(InvalidRequest, match="no other replica serves"):
        history.restart(1)
    history.wait_until(done)
