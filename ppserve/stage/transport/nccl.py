"""Hidden states over NCCL: one GPU per stage.

NCCL's sends and receives are work on a stream of their own, so that a receive does not queue behind the compute
that it should overlap. Events hand buffers over to the compute stream, and the host never waits.
A posted receive occupies a part of the GPU until its frame comes, so it is posted once its plan exists.
Frames flow one way: no two ranks send in both directions.

A dead neighbour does not end NCCL's wait. The head notices it (end of file, heartbeat) and announces it.
The thread that hears so aborts the communicators.
An aborted wait returns as if all were well, with anything in its buffer (`PointToPoint.interrupt`).
What is computed from it bears a lost epoch's number and is dropped.
Each group is aborted by its user: the pipeline's by its transport, that of tensor ranks by their gather.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from ppserve.errors import TransportError
from ppserve.stage.transport.frames import Frames
from ppserve.stage.transport.point_to_point import GroupBackend

_ABORT_WITHIN_S = 30.0
"""An abort may take the group's timeout, which is 20 s."""


def quiet_watchdog() -> None:
    """Keep the watchdog, torch's thread beside NCCL, from ending this process when a neighbour has died.

    The weights would be lost. Here the head notices losses, and the stage aborts its groups. Variables that the
    operator has set are kept. Called before the groups are made.
    """
    for name in ("ASYNC_ERROR_HANDLING", "DUMP_ON_TIMEOUT", "WAIT_TIMEOUT_DUMP_MILSEC"):
        os.environ.setdefault(f"TORCH_NCCL_{name}", "0")


class NcclBackend(GroupBackend):
    """Waits end with an abort of the group, which is destroyed only after it."""

    def __init__(self) -> None:
        self._once = threading.Lock()
        self._aborting: threading.Thread | None = None

    def interrupt(self, group: dist.ProcessGroup) -> None:
        # In a thread of its own: some NCCLs block, and the caller reads messages.
        with self._once:
            if self._aborting is None:
                self._aborting = threading.Thread(target=group.abort, name="nccl-abort", daemon=True)
                self._aborting.start()

    def close(self, group: dist.ProcessGroup, within_s: float = _ABORT_WITHIN_S) -> None:
        """Raise TransportError where the abort does not end: only a restart helps."""
        # Destroying a group that was not aborted waits for its kernels, and a posted receive may never end.
        # Destroying one that is being aborted blocks or crashes.
        self.interrupt(group)
        assert self._aborting is not None
        self._aborting.join(within_s)
        if self._aborting.is_alive():
            raise TransportError(f"nccl: the group was not aborted within {within_s:.0f} s")


class NcclStreamBackend(NcclBackend):
    """Frames stay on the GPU; compute and transfer streams take turns with buffers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._transfers = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Per buffer, the stage's last use, which the next transfer must not overtake.
        self._last_use: dict[int, torch.cuda.Event] = {}

    def buffer(self, frames: Frames) -> torch.Tensor:
        # Its memory may be another tensor's, with work under way on the compute stream.
        self.release(buffer := super().buffer(frames))
        return buffer

    def posting(self, buffer: torch.Tensor) -> AbstractContextManager[object]:
        last_use = self._last_use.pop(buffer.data_ptr(), None)
        if last_use is not None:
            self._transfers.wait_event(last_use)
        return torch.cuda.stream(self._transfers)

    def to_backend(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        # The send follows the compute that makes these hidden states.
        # The compute stream waits for the handle before the tensor is let go, and its memory reused.
        self.release(hidden_TD)
        return hidden_TD

    def release(self, buffer: torch.Tensor) -> None:
        self._last_use[buffer.data_ptr()] = torch.cuda.current_stream(self._device).record_event()
