"""What the request handler needs of the engine."""

from __future__ import annotations

from typing import Protocol

from ppserve.core.request import FinishReason, Request
from ppserve.head.descriptions import LoadDescription, ModelDescription, Topology
from ppserve.head.engine.output import Sink


class EngineHandle(Protocol):
    """The engine; see `head/handle.py`."""

    async def submit(self, request: Request, sink: Sink) -> None:
        """Begin a request, whose outputs go to `sink`. Raises RequestError (Overloaded, Draining, ...)."""

    def refuse_early(self, caller: str, new_tokens: int, priority: int, deadline_s: float | None) -> None:
        """Raises Overloaded where every request of so many new tokens or more would be refused now: before its
        prompt is tokenized."""

    def cancel(self, request_id: str, reason: FinishReason) -> None:
        """Nobody reads this request's outputs any more. Does nothing for ended and unknown requests."""

    async def restart(self, replica: int, pauses: bool) -> None:
        """Restart a replica's stage processes; returns when it serves again. Raises RequestError.

        pauses: also if no other replica could go on with its streams, which then wait.
        """

    def model_description(self) -> ModelDescription:
        """What is served."""

    def topology(self) -> Topology:
        """Where it runs. May wait for the engine's thread; called in a thread of its own."""

    def load(self) -> LoadDescription:
        """How full it is. As `topology`."""
