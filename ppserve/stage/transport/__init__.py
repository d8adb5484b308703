"""The data plane: hidden states from each stage to the next, and nothing else.

Shapes come from the plan, so there are no headers and no handshakes: a frame is (plan.num_tokens, D)
contiguous elements in the stages' dtype. T tokens, D width.

    local   all stages in one process, one thread each: the baseline, and the seam that tests use
    shm     processes of one host: puts into shared memory, one byte on a socket per arrival
    gloo    processes anywhere, CPU or GPU (staged through host memory)
    nccl    one GPU per stage
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from ppserve.core.plan import StepPlan
from ppserve.errors import ConfigError

if TYPE_CHECKING:
    from parallel_state import ParallelGroup


@dataclass(frozen=True, slots=True)
class Frames:
    """What the frames of one pipeline look like; every stage must be given the same (but for the device).

    max_rows: tokens of the largest step. depth: frames that a link holds on each side, at least 1; with
    fewer than the microbatches in flight, a fast sender waits for a slow receiver.
    """

    width: int
    dtype: torch.dtype
    max_rows: int
    depth: int = 4
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        assert min(self.width, self.max_rows, self.depth) > 0, f"{self} has an empty side"

    def empty(self, device: torch.device | None = None, pin_memory: bool = False) -> torch.Tensor:
        """A buffer that fits every frame: (max_rows, D)."""
        return torch.empty(
            self.max_rows, self.width, dtype=self.dtype, device=device or self.device, pin_memory=pin_memory
        )

    def check(self, plan: StepPlan, hidden_TD: torch.Tensor | None = None) -> int:
        """Rows of a step's frame. A frame that does not fit the plan or the buffers is a defect of ours."""
        rows = plan.num_tokens
        assert 1 <= rows <= self.max_rows, f"step {plan.step_id}: {rows} rows; buffers hold {self.max_rows}"
        if hidden_TD is not None:
            assert hidden_TD.shape == (rows, self.width), (
                f"step {plan.step_id}: {tuple(hidden_TD.shape)} is not ({rows}, {self.width})"
            )
            assert hidden_TD.dtype == self.dtype, f"step {plan.step_id}: {hidden_TD.dtype} is not {self.dtype}"
            assert hidden_TD.is_contiguous(), f"step {plan.step_id}: hidden states are not contiguous"
        return rows


class Transport(Protocol):
    """One stage's two ends: from the previous stage, to the next. Used by one thread, except `close`.

    Every stage receives and sends the steps of an epoch in the same order, each exactly once. The first
    stage never receives and the last never sends. After a TransportError only `close` is of use.
    """

    @property
    def name(self) -> str: ...

    def post_receive(self, plan: StepPlan) -> None:
        """Prepare to receive this step, as soon as its plan is known: it can then arrive during compute.

        In plan order, once per step. Any number may be posted; as many as the ring holds arrive ahead.
        """

    def receive(self, plan: StepPlan) -> torch.Tensor:
        """This step's hidden states (T, D), once they are there; the step must have been posted.

        The tensor belongs to the transport: it is valid until the next `receive`.
        Raises TransportError when the neighbour is gone or the transport is closed meanwhile.
        """

    def send(self, plan: StepPlan, hidden_TD: torch.Tensor) -> int:
        """Start sending to the next stage; returns bytes. Waits only while `depth` frames are under way.

        The tensor is kept until it is sent: the caller must not write to it again.
        Raises TransportError.
        """

    def warm_up(self) -> None:
        """Send one row over every link, so that connections exist before the first step. Collective."""

    def close(self) -> None:
        """Let go of everything. May be called twice, and from another thread to end a wait."""


class Store(Protocol):
    """The part of a `torch.distributed` store that neighbours need to find each other."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes:
        """The value, once somebody has set it."""


def create_transport(
    name: str, frames: Frames, group: ParallelGroup, store: Store | None = None
) -> Transport:
    """The transport `gloo`, `nccl` or `shm` for this rank's place in the pipeline `group`.

    store: where neighbours meet (`shm` only); fresh in every epoch. `local` has no ranks: its ends come from
    `local.connect`. Raises ConfigError for any other name.
    """
    if name == "gloo":
        from ppserve.stage.transport.gloo import gloo_transport

        return gloo_transport(frames, group)
    if name == "nccl":
        from ppserve.stage.transport.nccl import nccl_transport

        return nccl_transport(frames, group)
    raise ConfigError("--transport", f"{name!r} does not connect processes; choose gloo, nccl or shm")
