"""What crosses a link, and what a transport promises. T tokens, D width."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ppserve.core.plan import StepPlan

# Well above the scheduler's steps: 512 prompt tokens and the decodes.
MAX_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Frames:
    """The shape of the frames of one pipeline: every stage is given the same, but for the device.

    max_rows: tokens of the largest step; buffers on CPUs take memory only as far as steps fill them.
    depth: frames that a link holds ahead, at least 1. With fewer than the microbatches in flight, a fast sender
    waits for a slow receiver.
    """

    width: int
    dtype: torch.dtype
    max_rows: int = MAX_ROWS
    depth: int = 4
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        assert min(self.width, self.max_rows, self.depth) > 0, f"{self} has an empty side"

    def empty(self, device: torch.device | None = None, pin_memory: bool = False) -> torch.Tensor:
        """Return a buffer that fits every frame: (max_rows, D)."""
        return torch.empty(
            self.max_rows, self.width, dtype=self.dtype, device=device or self.device, pin_memory=pin_memory
        )

    def check(self, plan: StepPlan, hidden_TD: torch.Tensor | None = None) -> int:
        """Return the number of rows of a step's frame. Assert that the frame fits."""
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
    """Carries hidden states from the previous stage and to the next. Used by one thread, except `interrupt`.

    Stages receive and send the steps of an epoch in the same order, each once.
    The first never receives, the last never sends.
    After a TransportError only `close` is of use.
    """

    def post_receive(self, plan: StepPlan) -> None:
        """Prepare for a step whose plan is known, in order. As many as the ring holds arrive ahead."""

    def receive(self, plan: StepPlan) -> torch.Tensor:
        """Return the hidden states (T, D) of this step, which was posted, once they are there.

        Valid until the next `receive`: the tensor is the transport's.
        Raises TransportError when the neighbour is gone or the transport is interrupted.
        """

    def send(self, plan: StepPlan, hidden_TD: torch.Tensor) -> int:
        """Start sending; returns bytes. Waits only while `depth` frames are under way. Raises TransportError.

        Do not write to the tensor again.
        """

    def warm_up(self) -> None:
        """Send a row over every link, so that connections exist. Collective."""

    def interrupt(self) -> None:
        """Called by another thread: all waits end with TransportError. `close` is still due; after it, does
        nothing."""

    def close(self) -> None:
        """Release everything. May be called twice."""
