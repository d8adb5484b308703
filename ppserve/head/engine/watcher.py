"""What the engine tells those who only look on. It runs in the engine's thread and changes nothing there."""

from __future__ import annotations

from ppserve.core.ledger.account import Settled
from ppserve.core.ledger.steps import Step
from ppserve.errors import RequestError
from ppserve.head.engine.open_request import OpenRequest
from ppserve.head.engine.output import TokenOutput


class Watcher:
    """Hears everything and does nothing; `observe` overrides what it wants to hear."""

    def dispatched(self, step: Step) -> None:
        """A step was sent to all stages."""

    def reported(self, step: Step, stage: int) -> None:
        """A stage's result of a step is in the book."""

    def settled(self, settled: Settled) -> None:
        """The ledger named a stretch of a stage's time."""

    def epoch_lost(self) -> None:
        """What is in flight will not be reported any more."""

    def stage_died(self, stage: int, cause: str) -> None:
        """A stage process is gone. cause: one word."""

    def load(self, running: int, waiting: int, in_flight: int, kv_usage: float) -> None:
        """How full everything is at the end of a turn: sequences, requests, steps, share of KV blocks (0 to 1)."""

    def refused(self, error: RequestError) -> None:
        """A request ended before it was queued."""

    def output(self, opened: OpenRequest, output: TokenOutput, now_s: float) -> None:
        """A stream hears of a token, an end, or both; after `opened` has taken note of it."""
