"""What the engine tells metrics, trace and live page. An observer changes nothing.

All callbacks but `on_refused` run in the engine's thread. replica: its number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ppserve.core.ledger.account import Settled
from ppserve.core.ledger.steps import Step
from ppserve.errors import RequestError
from ppserve.head.engine.streams import OpenRequest, TokenOutput


class Observer:
    """A receiver of the engine's callbacks, each of which does nothing here."""

    def on_step_sent(self, replica: int, step: Step) -> None:
        """A step was sent to all stages."""

    def on_step_reported(self, replica: int, step: Step, stage: int) -> None:
        """A stage's result of a step is in the book."""

    def on_span_settled(self, replica: int, settled: Settled) -> None:
        """The ledger attributed an interval of a stage's time."""

    def on_stage_died(self, replica: int, stage: int, cause: str) -> None:
        """A stage process died. cause: one word."""

    def on_load(self, replica: int, running: int, waiting: int, in_flight: int, kv_usage: float) -> None:
        """A turn ended. running: sequences. waiting: requests. in_flight: steps. kv_usage: 0 to 1."""

    def on_drafted(self, replica: int, outcomes: Mapping[str, int]) -> None:
        """A turn ended. outcomes: draft tokens so far, by what became of them."""

    def on_refused(self, error: RequestError) -> None:
        """A request was refused. Called in any thread."""

    def on_output(self, opened: OpenRequest, output: TokenOutput, now_s: float) -> None:
        """A stream gets a token, an end, or both. `opened` is already up to date."""


Observers = Sequence[Observer]
