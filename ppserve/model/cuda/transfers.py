"""The two copies of a step: its arrays to the device, without a wait, and what it draws back, the only wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.core.plan import StepPlan
from ppserve.model.backend import Reading, Results
from ppserve.model.cuda.device import Accelerator, Mark
from ppserve.model.cuda.sampling import results_of

Arrays = Mapping[str, NDArray[Any]]

_ALIGNMENT = 16
_BUFFERS = 3
"""Copies that may be under way before the host waits for the oldest."""
_BUFFER_BYTES = 1 << 20
"""Of a buffer at first: pinning a larger one later makes the host wait."""

_TORCH: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


def packed_bytes(arrays: Arrays) -> int:
    """The memory of these arrays one after the other."""
    return sum(_aligned(array.nbytes) for array in arrays.values())


class Staging:
    """Copies arrays to the device by way of pinned buffers. Used by one thread."""

    def __init__(self, device: Accelerator) -> None:
        self.device = device.device
        self._device = device
        self._free: deque[torch.Tensor] = deque(device.host_buffer(_BUFFER_BYTES) for _ in range(_BUFFERS))
        self._under_way: deque[tuple[Mark, torch.Tensor]] = deque()

    def copy(self, arrays: Arrays, buffer: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Copies arrays one after the other, by one copy, into a buffer of the device or into new memory.
        Returns them as flat tensors. In the same buffer, arrays of the same sizes have the same addresses."""
        num_bytes = packed_bytes(arrays)
        host = self._host_buffer(num_bytes)
        to = torch.empty(num_bytes, dtype=torch.uint8, device=self.device) if buffer is None else buffer
        assert num_bytes <= len(to), f"{num_bytes} bytes where {len(to)} fit"
        numbers, tensors, begin, end = host.numpy(), dict[str, torch.Tensor](), 0, 0
        for name, array in arrays.items():
            end = begin + array.nbytes
            numbers[begin:end].view(array.dtype)[:] = array.reshape(-1)
            tensors[name] = to[begin:end].view(_TORCH[array.dtype])
            begin += _aligned(array.nbytes)
        if end:  # not what pads the last array: behind it the buffer holds older block tables
            self._device.copy(to[:end], host[:end])
        self._under_way.append((self._device.mark(), host))
        return tensors

    def _host_buffer(self, num_bytes: int) -> torch.Tensor:
        """A pinned buffer that no copy still reads."""
        if not self._free:
            mark, host = self._under_way.popleft()
            mark.wait()
            self._free.append(host)
        host = self._free.popleft()
        return host if len(host) >= num_bytes else self._device.host_buffer(2 * num_bytes)


class Readback:
    """Copies results to pinned memory of the host."""

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._host = device.host_buffer(1 << 12)

    def reading(self, plan: StepPlan, columns_RC: torch.Tensor | None) -> Reading:
        """Starts the copy of the columns of a plan's rows; None if it has none.

        The reading must be called before the next one is made.
        """
        if columns_RC is None:
            return lambda: ((), ())
        if len(self._host) < columns_RC.nbytes:
            self._host = self._device.host_buffer(2 * columns_RC.nbytes)
        host_RC = self._host[: columns_RC.nbytes].view(torch.float64).view(columns_RC.shape)
        self._device.copy(host_RC, columns_RC)
        mark = self._device.mark()

        def results() -> Results:
            mark.wait()
            return results_of(plan, host_RC.numpy())

        return results


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
