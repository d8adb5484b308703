"""Hidden states over the sends and receives of a `torch.distributed` group, as gloo and NCCL have them in common.

Handles and buffers are kept until they are complete. A receive is posted when its plan is known and a buffer is
free. The buffer that `receive` returns is free again at the next `receive`. Waits block, because gloo's
`is_completed()` stays False after a peer's death, while its `wait()` raises at once.

Gloo sends host memory, on any network. It cancels a posted receive only when the neighbour's end closes. So an
interrupted stage waits until the neighbour leaves the group or is killed, or for the group's timeout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ppserve.core.plan import StepPlan
from ppserve.errors import TransportError
from ppserve.stage.parallel_state import ParallelGroup
from ppserve.stage.transport.frames import Frames, ReceiveOrder


class GroupBackend:
    """What differs between the backends of torch.distributed: where buffers are, and how waits end. This class
    itself is for gloo, with frames in host memory."""

    def buffer(self, frames: Frames) -> torch.Tensor:
        """Make a receive buffer (max_rows, D) where the backend can write."""
        return frames.empty()

    def posting(self, buffer: torch.Tensor) -> AbstractContextManager[object]:
        """Return the context in which a send or receive of this buffer is posted."""
        return nullcontext()

    def to_backend(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Return the tensor to send: hidden_TD, or a copy where the backend can read."""
        return hidden_TD

    def to_stage(self, buffer_TD: torch.Tensor) -> torch.Tensor:
        """Return the tensor for the stage, from a buffer that has been received."""
        return buffer_TD

    def release(self, buffer: torch.Tensor) -> None:
        """Note that the stage has enqueued its last use of this buffer."""

    def interrupt(self, group: dist.ProcessGroup) -> None:
        """End the group's work, if the end of a neighbour does not do that. Another thread may call this."""

    def close(self, group: dist.ProcessGroup) -> None:
        """Prepare for the group being destroyed. It may be called twice."""


class PinnedGlooBackend(GroupBackend):
    """Sends frames of a GPU over gloo: they are copied to and from pinned memory, and the host waits for that."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def buffer(self, frames: Frames) -> torch.Tensor:
        return frames.empty(torch.device("cpu"), pin_memory=True)

    def to_backend(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        return torch.empty(hidden_TD.shape, dtype=hidden_TD.dtype, pin_memory=True).copy_(hidden_TD)

    def to_stage(self, buffer_TD: torch.Tensor) -> torch.Tensor:
        return buffer_TD.to(self._device)


class GroupUser:
    """Exchanges tensors in a group of `torch.distributed`, until it is closed."""

    def __init__(self, name: str, group: ParallelGroup, backend: GroupBackend) -> None:
        self.name = name
        self._group = group
        self._backend = backend
        self._closed = False

    def interrupt(self) -> None:
        # The order matters: an aborted wait may return as if it had succeeded.
        self._closed = True
        self._backend.interrupt(self._group.process_group)

    def close(self) -> None:
        """Close. Exchanges that are under way end with the group (`destroy_model_parallel`)."""
        self._closed = True
        self._backend.close(self._group.process_group)

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"{self.name}: the transport is closed")

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Raise an error of the backend as a TransportError, unless the device is lost."""
        self._check_open()
        try:
            yield
        except torch.AcceleratorError:
            raise
        except RuntimeError as error:
            raise TransportError(first_line(self.name, error)) from error


@dataclass(frozen=True, slots=True)
class _Arriving:
    handle: dist.Work
    buffer: torch.Tensor
    rows: int


class PointToPoint(GroupUser):
    """A `Transport` over one group of `torch.distributed`."""

    def __init__(self, name: str, frames: Frames, group: ParallelGroup, backend: GroupBackend) -> None:
        super().__init__(name, group, backend)
        self._frames = frames
        self._order = ReceiveOrder()
        self._planned: deque[int] = deque()  # numbers of rows of steps that have no buffer yet
        self._arriving: deque[_Arriving] = deque()
        # There is one buffer more than frames that may arrive ahead: the one that the stage reads.
        receives = group.prev_rank is not None
        self._free = deque(backend.buffer(frames) for _ in range(frames.depth + 1 if receives else 0))
        self._in_use: torch.Tensor | None = None
        self._sending: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def post_receive(self, plan: StepPlan) -> None:
        self._order.post(plan)
        self._planned.append(self._frames.check(plan))
        self._post()

    def receive(self, plan: StepPlan) -> torch.Tensor:
        self._order.check_next(plan)
        if self._in_use is not None:
            self._backend.release(self._in_use)
            self._free.append(self._in_use)
            self._in_use = None
        self._post()
        self._check_open()
        frame = self._arriving.popleft()
        self._wait(frame.handle)
        self._in_use = frame.buffer
        return self._backend.to_stage(frame.buffer[: frame.rows])

    def send(self, plan: StepPlan, hidden_TD: torch.Tensor) -> int:
        self._frames.check(plan, hidden_TD)
        return self._send(hidden_TD)

    def warm_up(self) -> None:
        if self._group.next_rank is not None:
            self._send(torch.zeros(1, self._frames.width, dtype=self._frames.dtype, device=self._frames.device))
        if self._group.prev_rank is not None:
            self._wait(self._receive_into(self._free[0][:1]))
        if self._sending:
            self._wait(self._sending.popleft()[0])

    def close(self) -> None:
        super().close()
        self._planned.clear()
        self._arriving.clear()
        self._sending.clear()

    def _post(self) -> None:
        while self._planned and self._free:
            rows = self._planned.popleft()
            buffer = self._free.popleft()
            self._arriving.append(_Arriving(self._receive_into(buffer[:rows]), buffer, rows))

    def _receive_into(self, buffer_TD: torch.Tensor) -> dist.Work:
        assert self._group.prev_rank is not None, "the first stage receives nothing"
        with self._exchange(), self._backend.posting(buffer_TD):
            handle = dist.irecv(buffer_TD, self._group.prev_rank, group=self._group.process_group)
        assert handle is not None
        return handle

    def _send(self, hidden_TD: torch.Tensor) -> int:
        assert self._group.next_rank is not None, "the last stage sends nothing"
        if len(self._sending) == self._frames.depth:
            self._wait(self._sending.popleft()[0])
        outgoing_TD = self._backend.to_backend(hidden_TD)
        with self._exchange(), self._backend.posting(outgoing_TD):
            handle = dist.isend(outgoing_TD, self._group.next_rank, group=self._group.process_group)
        assert handle is not None
        self._sending.append((handle, outgoing_TD))
        return outgoing_TD.nbytes

    def _wait(self, handle: dist.Work) -> None:
        with self._exchange():
            handle.wait()
        self._check_open()


def first_line(name: str, error: RuntimeError) -> str:
    """Return the text of a backend's error without its stack trace and source path."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"{name}: {text.rpartition('] ')[2] if text.startswith('[') else text}"
