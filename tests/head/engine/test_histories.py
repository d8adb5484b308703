"""Simulated histories: 2,000 seeds, and defects that they must find.

A seed that fails prints what happened; `History(seed).run()` replays it.
"""

from __future__ import annotations

import logging
import selectors
from collections.abc import Container, Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from typing import Any

import pytest

from ppserve import wire
from ppserve.core.ledger.tensor_ranks import TensorRanks
from ppserve.core.plan import StepResult
from ppserve.core.request import FinishReason
from ppserve.core.scheduling.poison_isolation import PoisonIsolation
from ppserve.core.scheduling.scheduler import Scheduler
from ppserve.core.scheduling.sequence import SequenceEvent
from ppserve.core.scheduling.slots import MicrobatchSlots
from ppserve.errors import RequestError
from ppserve.head.engine.control import Disconnected, Received
from ppserve.head.engine.member import EpochLost, FatalError, Formed, MemberEvent, StageState
from ppserve.head.engine.members import Members
from ppserve.head.engine.output import TokenOutput
from ppserve.head.engine.replica import Replica
from ppserve.process.patience import Life, Patience
from tests.head.engine.history import History
from tests.head.engine.simulated_stages import Host, StageProcess
from tests.head.engine.simulated_world import SimulatedControl
from tests.slow import quick_first

pytestmark = pytest.mark.any_worker

NUM_HISTORIES = 2_000
AT_ONCE = 25
NEVER_HEAL = range(10, NUM_HISTORIES, 32)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", quick_first(range(0, NUM_HISTORIES, AT_ONCE)))
def test_everything_is_served_whatever_happens(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        try:
            History(seed).run()
        except AssertionError as error:
            raise AssertionError(f"history {seed}: {error}") from None


def test_a_seed_replays_its_history_exactly() -> None:
    for seed in (2, 7, 31):
        assert History(seed).run() == History(seed).run()
    assert History(2).run() != History(3).run()


@pytest.mark.parametrize("seed", range(20))
def test_what_cannot_be_is_not_tried_for_ever(seed: int) -> None:
    history = History(seed)
    if history.num_stages > 1:
        assert "did not form in 10 attempts" in history.run_without_a_way()


class LoadsAtAnyTime(Members):
    """Takes weights that were loaded again for the word of a stage that has left its epoch."""

    def _handle(self, rank: int, now_ns: int, message: wire.FromStage) -> list[MemberEvent]:
        if isinstance(message, wire.Ready) and self[rank].stage == 0:
            self._move(rank, StageState.LOADED, now_ns)
            return []
        return super()._handle(rank, now_ns, message)


class HasNoPatience(Members):
    """The server ends when the first epoch after a loss does not form."""

    def _lose_epoch(self, cause: str, stage: int | None, now_ns: int) -> list[MemberEvent]:
        if self._forming:
            self._attempts = 9
        return super()._lose_epoch(cause, stage, now_ns)


class TriesForEver(Members):
    """Counts no attempts."""

    def _lose_epoch(self, cause: str, stage: int | None, now_ns: int) -> list[MemberEvent]:
        self._attempts = 0
        return super()._lose_epoch(cause, stage, now_ns)


class RemembersLostSteps(Replica):
    """Waits for the results of an epoch that is lost."""

    def _handle_epoch_lost(self, lost: EpochLost) -> None:
        self._account.stage_lost(self._clock())


class LastRankSpeaks(TensorRanks):
    """Takes the draws of a tensor rank that does not draw."""

    def _together(self, stage: int, ranks: list[StepResult]) -> StepResult:
        return super()._together(stage, ranks[::-1])


class HearsTheLastRank(Replica):
    def __init__(self, members: Members, *others: Any) -> None:
        super().__init__(members, *others)
        self._ranks = LastRankSpeaks(members.num_stages, members.grid.tensor)


class ForgetsSlowDeaths(Patience):
    """Counts only deaths that follow each other within 10 s."""

    _died_s = 0.0

    def ended(self, life: Life, code: int, now_s: float) -> str | None:
        if now_s - self._died_s > 10.0:
            self._deaths = 0
        self._died_s = now_s
        return super().ended(life, code, now_s)


class IsForgetful(Host):
    new_patience = ForgetsSlowDeaths


class ThreeLossesConvict(PoisonIsolation):
    """Whoever was in flight at three losses without a token between them is convicted."""

    def record_loss(
        self, in_flight: Iterable[str], failed: Set[Hashable], elsewhere: Container[str] = ()
    ) -> str | None:
        for request in in_flight:
            self._losses[request] = self._losses.get(request, 0) + 1
            if self._losses[request] == 3:
                return request
        return None


class WaitsForAKey(Host):
    """A rank whose agent was started again looks for the head under a key with its own count of restarts, which
    the head has not written."""

    def replace(self, rank: int, code: int, after_s: float = 0.0) -> None:
        super().replace(rank, code, after_s if not after_s else 1e6)


class RemembersTheSecret(Host):
    """Ranks take the secret of the first head that they found to every later one."""

    _first: bytes | None = None

    def secret(self) -> bytes:
        self._first = self._first or super().secret()
        return self._first


class ReadsTheDead(SimulatedControl):
    """Reads in the kernel's order, also a connection that a greeting in the same poll has ended."""

    def poll(self, timeout_s: float) -> list[Received | Disconnected]:
        for key, mask in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
                continue
            if not key.data.is_open:
                self._selector.unregister(key.data.connection)
            if mask & selectors.EVENT_WRITE:
                self._flush(key.data)
            if mask & selectors.EVENT_READ:
                self._read(key.data)
        return super().poll(timeout_s)


class SaysNothingOfProbes(MicrobatchSlots):
    """Requests that kill, many at once, use up the deaths and the epochs that a server may lose."""

    def lose(self, epoch: int) -> frozenset[str]:
        requests = super().lose(epoch)
        self.is_unproven = False
        return requests


class HasNoProbes(Replica):
    def _new_scheduler(self, formed: Formed) -> Scheduler:
        scheduler = super()._new_scheduler(formed)
        scheduler.slots.__class__ = SaysNothingOfProbes
        return scheduler


class ReplacesForEver(Replica):
    """Stages that compute a probe and die of each request are replaced without end."""

    def _count_loss(self, lost: EpochLost) -> list[FatalError]:
        return []


DEFECTS: dict[str, tuple[dict[str, Any], range]] = {
    "forms for ever": ({"members": TriesForEver}, NEVER_HEAL),
    "slow crash loops": ({"host": IsForgetful}, NEVER_HEAL),
    "innocents convicted": ({"poison_isolation": ThreeLossesConvict}, range(60)),
    "stages that die of each request": ({"replica": ReplacesForEver}, NEVER_HEAL),
    "a restarted rank waits for a key": ({"host": WaitsForAKey}, range(60)),
    "a head's secret is remembered": ({"host": RemembersTheSecret}, range(60)),
    "a Hello beside an end": ({"control": ReadsTheDead}, range(200)),
    "many killers end the server": ({"replica": HasNoProbes}, range(150)),
    "the last rank speaks": ({"replica": HearsTheLastRank}, range(60)),
    "loads at any time": ({"members": LoadsAtAnyTime}, range(10)),
    "no patience": ({"members": HasNoPatience}, range(100)),
    "remembers lost steps": ({"replica": RemembersLostSteps}, range(60)),
}
"""What is planted, and of which histories one finds it."""


@pytest.mark.parametrize(("kind", "seeds"), DEFECTS.values(), ids=DEFECTS)
def test_a_planted_defect_is_found(kind: dict[str, Any], seeds: range) -> None:
    assert histories_to_find(seeds, **kind) is not None


class BlamesNobody(Replica):
    """A request that kills its stage is handed from replica to replica."""

    def _blame_requests(self) -> list[SequenceEvent]:
        return []


def test_a_request_that_goes_from_replica_to_replica_is_found_out() -> None:
    """The control of the histories with two replicas."""
    assert histories_to_find(range(100), replica=BlamesNobody, num_replicas=2) is not None


def histories_to_find(seeds: range, **kind: Any) -> int | None:
    """How many histories find a defect, counted from the first of all; None if none of these does."""
    for seed in seeds:
        try:
            History(seed, **kind).run()
        except AssertionError:
            return seed + 1
    return None


class Ends:
    """How the requests of a history ended."""

    def __init__(self) -> None:
        self.finished: list[FinishReason] = []
        self.failed: list[RequestError] = []

    def push(self, outputs: Sequence[TokenOutput]) -> None:
        self.finished += [output.finish for output in outputs if output.finish is not None]
        self.failed += [output.error for output in outputs if output.error is not None]


@pytest.mark.parametrize("heals", [True, False])
def test_a_last_stage_whose_every_step_fails_is_replaced_or_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, heals: bool
) -> None:
    """heals: a new process of it computes, as after an error that stays in a GPU's context; nobody is blamed."""
    compute = StageProcess._compute

    def fail(stage: StageProcess) -> None:
        if not stage._is_last or (heals and stage._host.num_deaths):
            compute(stage)
        elif stage._is_ready and stage._plans:
            stage._break("step failed")

    monkeypatch.setattr(StageProcess, "_compute", fail)
    history = next(h for h in (History(seed, num_replicas=1) for seed in range(9)) if h.num_stages > 1)
    ends, engine = Ends(), history.engine
    monkeypatch.setattr(history, "_check", lambda: None)  # it knows nothing of these requests
    history.engine.begin()
    history._tick()
    while not engine.formed.done():
        history.world.step()
    for number in range(8):
        request = replace(history._some_request(100 + number, False), deadline_s=None, num_sequences=1)
        engine.submit(request, ends, None)
    while len(ends.finished) + len(ends.failed) < 8:
        history.world.step()
    assert engine.failed.done() is not heals
    if heals:
        assert not ends.failed
    else:
        assert "did not compute a step in 10 attempts" in engine.failed.result().reason
