"""Hidden states over NCCL, between stages with a GPU each.

NCCL's sends and receives are work on a stream of their own, so that a receive does not queue behind the
computation that it should overlap. Events hand buffers over to the computing stream, and the host never waits. A
posted receive occupies a part of the GPU until its frame arrives, so it is posted only when its plan exists.
Frames flow one way: no two ranks send in both directions.

The death of a neighbour does not end NCCL's wait. The head notices it (end of file, heartbeat) and tells the
stage, whose receiving thread aborts the communicators. An aborted wait returns as if it had succeeded, with
anything in its buffer (`PointToPoint.interrupt`). What is computed from that belongs to a lost epoch, and is
dropped. Each group is aborted by its user: the pipeline's by the transport, and that of tensor ranks by their
gather.
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
    """Keep torch's watchdog thread from ending this process when a neighbour has died: the weights would be lost.

    Here the head notices losses, and the stage aborts its groups. Variables that the operator has set are kept.
    This must be called before the groups are made.
    """
    for name in ("ASYNC_ERROR_HANDLING", "DUMP_ON_TIMEOUT", "WAIT_TIMEOUT_DUMP_MILSEC"):
        os.environ.setdefault(f"TORCH_NCCL_{name}", "0")


class NcclBackend(GroupBackend):
    """A backend whose waits are ended by aborting the group. The group is destroyed only after that."""

    def __init__(self) -> None:
        self._once = threading.Lock()
        self._aborting: threading.Thread | None = None

    def interrupt(self, group: dist.ProcessGroup) -> None:
        # This has a thread of its own: some versions of NCCL block, and the calling thread must read messages.
        with self._once:
            if self._aborting is None:
                self._aborting = threading.Thread(target=group.abort, name="nccl-abort", daemon=True)
                self._aborting.start()

    def close(self, group: dist.ProcessGroup, within_s: float = _ABORT_WITHIN_S) -> None:
        """Wait for the abort. Raises TransportError if it does not end: then only a restart helps."""
        # Destroying a group that was not aborted waits for its kernels, and a posted receive may never end.
        # Destroying one that is being aborted blocks or crashes.
        self.interrupt(group)
        assert self._aborting is not None
        self._aborting.join(within_s)
        if self._aborting.is_alive():
            raise TransportError(f"nccl: the group was not aborted within {within_s:.0f} s")


class NcclStreamBackend(NcclBackend):
    """A backend whose frames stay on the GPU. The computing stream and the transferring stream take turns with
    buffers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._transfers = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The stage's last use of each buffer, before which the next transfer must not begin.
        self._last_use: dict[int, torch.cuda.Event] = {}

    def buffer(self, frames: Frames) -> torch.Tensor:
        # The computing stream may still use this memory for a tensor that is gone.
        self.release(buffer := super().buffer(frames))
        return buffer

    def posting(self, buffer: torch.Tensor) -> AbstractContextManager[object]:
        last_use = self._last_use.pop(buffer.data_ptr(), None)
        if last_use is not None:
            self._transfers.wait_event(last_use)
        return torch.cuda.stream(self._transfers)

    def to_backend(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        # The send comes after the computation of these hidden states. The computing stream waits for the handle
        # before the tensor is dropped and its memory is reused.
        self.release(hidden_TD)
        return hidden_TD

    def release(self, buffer: torch.Tensor) -> None:
        self._last_use[buffer.data_ptr()] = torch.cuda.current_stream(self._device).record_event()
