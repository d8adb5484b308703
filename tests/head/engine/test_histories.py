"""Simulated histories: 250 seeds, in `make test-all` 2,000 or PPSERVE_HISTORIES; and defects that they must find.

A seed that fails prints what happened; `History(seed).run()` replays it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Iterable, Iterator, Set
from concurrent.futures import Future
from typing import Any

import pytest

from ppserve.core.architecture import Split
from ppserve.core.scheduling.poison_isolation import PoisonIsolation
from ppserve.head.engine.replica import Replica
from tests.head.engine.history import History
from tests.slow import quick_first, thorough

pytestmark = pytest.mark.any_worker

NUM_HISTORIES = int(os.environ.get("PPSERVE_HISTORIES", "2000"))
AT_ONCE = 25
FIRST_ONES = range(0, NUM_HISTORIES, AT_ONCE)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", [*quick_first(FIRST_ONES[:10]), *thorough(*FIRST_ONES[10:])])
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


class RemembersLostSteps(Replica):
    """Waits for the results of an epoch that is lost."""

    def lose_epoch(self) -> None:
        self._account.stage_lost(self._clock())


class ThreeLossesConvict(PoisonIsolation):
    """Convicts the first request that was in flight at three losses without a token between them."""

    def record_loss(self, in_flight: Iterable[str], failed: Set[Hashable]) -> str | None:
        for request in sorted(in_flight):
            self._losses[request] = self._losses.get(request, 0) + 1
            if self._losses[request] == 3:
                return request
        return None


class BlamesForReshapes(Replica):
    """Keeps who was in flight when layers were divided anew, for the next rank that dies."""

    def reshape(self, split: Split, formed: Future[int]) -> None:
        self._handle_event(self.members.reshape(split, formed, self._clock()))


DEFECTS: dict[str, tuple[dict[str, Any], range]] = {
    "innocents convicted": ({"poison_isolation": ThreeLossesConvict}, range(120)),
    "blames for reshapes": ({"replica": BlamesForReshapes}, range(120)),
    "remembers lost steps": ({"replica": RemembersLostSteps}, range(60)),
}
"""What is planted, and which histories are searched for it."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seeds"), DEFECTS.values(), ids=DEFECTS)
def test_a_planted_defect_is_found(kind: dict[str, Any], seeds: range) -> None:
    def fails(seed: int) -> bool:
        try:
            History(seed, **kind).run()
        except AssertionError:
            return True
        return False

    assert any(map(fails, seeds))
