"""The engine's callbacks for metrics, trace and live page. They must not change anything.

All but `refused` run in the engine's thread.
"""

from __future__ import annotations

from collections.abc import Mapping

from ppserve.core.ledger.account import Settled
from ppserve.core.ledger.steps import Step
from ppserve.errors import RequestError
from ppserve.head.engine.open_request import OpenRequest
from ppserve.head.engine.output import TokenOutput


class Watcher:
    """Every callback does nothing here; `observe.Observer` overrides them."""

    def dispatched(self, step: Step) -> None:
        """A step was sent to all stages."""

    def reported(self, step: Step, stage: int) -> None:
        """A stage's result of a step is in the book."""

    def settled(self, settled: Settled) -> None:
        """The ledger attributed an interval of a stage's time."""

    def epoch_lost(self) -> None:
        """Steps in flight will not be reported."""

    def stage_died(self, stage: int, cause: str) -> None:
        """A stage process died. cause: one word."""

    def load(self, running: int, waiting: int, in_flight: int, kv_usage: float) -> None:
        """At the end of a turn. running: sequences. waiting: requests. in_flight: steps. kv_usage: 0 to 1."""

    def drafted(self, outcomes: Mapping[str, int]) -> None:
        """At the end of a turn. outcomes: drafted tokens so far, by what became of them."""

    def refused(self, error: RequestError) -> None:
        """A request was refused. Called in any thread."""

    def output(self, opened: OpenRequest, output: TokenOutput, now_s: float) -> None:
        """A stream gets a token, an end, or both. `opened` is already up to date."""
