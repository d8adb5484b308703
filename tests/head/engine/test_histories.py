"""Simulated histories: 2,000 seeds, and defects that they must find.

A seed that fails prints what happened; `History(seed).run()` replays it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ppserve import wire
from ppserve.core.ledger.tensor_ranks import TensorRanks
from ppserve.core.plan import StepResult
from ppserve.core.request import FinishReason
from ppserve.core.scheduling.sequence import SequenceEvent
from ppserve.errors import RequestError
from ppserve.head.engine.member import EpochLost, MemberEvent, StageState
from ppserve.head.engine.members import Members
from ppserve.head.engine.output import TokenOutput
from ppserve.head.engine.replica import Replica
from tests.head.engine.history import History
from tests.head.engine.simulated_stages import StageProcess
from tests.slow import quick_first

NUM_HISTORIES = 2_000
AT_ONCE = 25


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

    def _take(self, rank: int, now_ns: int, message: wire.FromStage) -> list[MemberEvent]:
        if isinstance(message, wire.Ready) and self[rank].stage == 0:
            self._move(rank, StageState.LOADED, now_ns)
            return []
        return super()._take(rank, now_ns, message)


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

    def _epoch_lost(self, lost: EpochLost) -> None:
        self._account.stage_lost(self._clock())


class LastRankSpeaks(TensorRanks):
    """Takes the draws of a tensor rank that does not draw."""

    def _together(self, stage: int, ranks: list[StepResult]) -> StepResult:
        return super()._together(stage, ranks[::-1])


class HearsTheLastRank(Replica):
    def __init__(self, members: Members, *others: Any) -> None:
        super().__init__(members, *others)
        self._ranks = LastRankSpeaks(members.num_stages, members.grid.tensor)


@pytest.mark.parametrize(
    ("kind", "within"),
    [
        ({"replica": HearsTheLastRank}, 8),
        ({"members": LoadsAtAnyTime}, 1),
        ({"members": HasNoPatience}, 100),
        ({"replica": RemembersLostSteps}, 20),
    ],
)
def test_a_planted_defect_is_found(kind: dict[str, Any], within: int) -> None:
    assert histories_to_find(within, **kind) <= within


def test_endless_attempts_are_found() -> None:
    histories = (History(seed, TriesForEver, num_replicas=1) for seed in range(9))
    history = next(history for history in histories if history.num_stages > 1)
    with pytest.raises(AssertionError, match="not served after"):
        history.run_without_a_way()


class BlamesNobody(Replica):
    """A request that kills its stage is handed from replica to replica."""

    def _blame(self) -> list[SequenceEvent]:
        return []


def test_a_request_that_goes_from_replica_to_replica_is_found_out() -> None:
    """The control of the histories with two replicas."""
    assert histories_to_find(100, replica=BlamesNobody, num_replicas=2) <= 100


def histories_to_find(at_most: int, **kind: Any) -> int:
    """How many histories find a defect."""
    for seed in range(at_most):
        try:
            History(seed, **{"num_replicas": 1, **kind}).run()
        except AssertionError:
            return seed + 1
    return at_most + 1


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
    history.fleet.start()
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
