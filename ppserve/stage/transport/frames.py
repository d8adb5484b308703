"""The frames that stages send to each other, and what a transport promises. T tokens, D width."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ppserve.core.plan import StepPlan

# The scheduler's steps are much smaller: 512 prompt tokens and the decodes.
MAX_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Frames:
    """The shape of a pipeline's frames. It is the same for every stage, apart from the device.

    max_rows: tokens of the largest step; on CPUs, buffers take memory only as far as steps fill them. depth: how
    many frames may be under way between two stages, at least 1. If it is less than the number of steps in flight,
    a fast sender may have to wait for a slow receiver.
    """

    width: int
    dtype: torch.dtype
    max_rows: int = MAX_ROWS
    depth: int = 4
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        assert min(self.width, self.max_rows, self.depth) > 0, f"{self} has an empty side"

    def empty(self, device: torch.device | None = None, pin_memory: bool = False) -> torch.Tensor:
        """Return a buffer (max_rows, D), into which every frame fits."""
        return torch.empty(
            self.max_rows, self.width, dtype=self.dtype, device=device or self.device, pin_memory=pin_memory
        )

    def check(self, plan: StepPlan, hidden_TD: torch.Tensor | None = None) -> int:
        """Assert that a step's frame fits. Return its number of rows."""
        rows = plan.num_tokens
        assert 1 <= rows <= self.max_rows, f"step {plan.step_id}: {rows} rows; buffers hold {self.max_rows}"
        if hidden_TD is not None:
            assert hidden_TD.shape == (rows, self.width), (
                f"step {plan.step_id}: {tuple(hidden_TD.shape)} is not ({rows}, {self.width})"
            )
            assert hidden_TD.dtype == self.dtype, f"step {plan.step_id}: {hidden_TD.dtype} is not {self.dtype}"
            assert hidden_TD.is_contiguous(), f"step {plan.step_id}: hidden states are not contiguous"
        return rows


class ReceiveOrder:
    """Asserts that steps are received once each, in the order in which they were posted."""

    def __init__(self) -> None:
        self._posted: deque[int] = deque()

    def post(self, plan: StepPlan) -> None:
        self._posted.append(plan.step_id)

    def check_next(self, plan: StepPlan) -> None:
        assert self._posted, f"step {plan.step_id} was not posted"
        step_id = self._posted.popleft()
        assert step_id == plan.step_id, f"step {plan.step_id} is received where step {step_id} is next"


class Transport(Protocol):
    """Carries hidden states from the previous stage and to the next. It is used by one thread, apart from
    `interrupt`.

    Stages receive and send the steps of an epoch in the same order, each once. The first stage never receives, and
    the last one never sends. After a TransportError only `close` may be called.
    """

    def post_receive(self, plan: StepPlan) -> None:
        """Prepare to receive a step, in order, once its plan is known. Up to `depth` frames may arrive ahead."""

    def receive(self, plan: StepPlan) -> torch.Tensor:
        """Wait for the hidden states of a step that was posted, and return them, (T, D).

        The tensor belongs to the transport, and is valid until the next `receive`. Raises TransportError if the
        neighbour is gone, or the transport is interrupted.
        """

    def send(self, plan: StepPlan, hidden_TD: torch.Tensor) -> int:
        """Begin to send hidden states. Return the number of bytes. This waits only while `depth` frames are under
        way. The tensor must not be written to afterwards. Raises TransportError."""

    def warm_up(self) -> None:
        """Send a row over every connection, so that it exists. All stages must call this."""

    def interrupt(self) -> None:
        """End all waits with TransportError. Another thread may call this. `close` must still be called; after it,
        this does nothing."""

    def close(self) -> None:
        """Release everything. It may be called twice."""
