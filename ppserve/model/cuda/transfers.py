"""The two copies of a step: its arrays to the device, without a wait, and what it draws back, the only wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

_TORCH: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array lies in a buffer of bytes."""

    offset: int
    dtype: np.dtype[Any]
    capacity: int
    """In elements."""


@dataclass(frozen=True, slots=True)
class Places:
    """The places of all arrays of a step in one buffer."""

    by_name: Mapping[str, Place]
    num_bytes: int
    """Of the whole buffer."""

    @classmethod
    def for_arrays(cls, arrays: Arrays) -> Places:
        """One after the other, each just large enough."""
        places, offset = {}, 0
        for name, array in arrays.items():
            places[name] = Place(offset, array.dtype, array.size)
            offset += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return cls(places, max(offset, _ALIGNMENT))

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arrays within a buffer of bytes, flat."""
        return {
            name: buffer[at.offset : at.offset + at.capacity * at.dtype.itemsize].view(_TORCH[at.dtype])
            for name, at in self.by_name.items()
        }


class Staging:
    """Copies arrays to the device by way of pinned buffers. Used by one thread."""

    def __init__(self, device: Accelerator) -> None:
        self.device = device.device
        self._device = device
        self._free: deque[torch.Tensor] = deque(device.host_buffer(1 << 16) for _ in range(_BUFFERS))
        self._under_way: deque[tuple[Mark, torch.Tensor]] = deque()
        self.num_copies = 0
        """How often it has copied."""

    def copy(self, arrays: Arrays, places: Places, buffer: torch.Tensor) -> None:
        """Copies arrays into a buffer of the device, each to its place. The rest of a place keeps its content."""
        host = self._host_buffer(places.num_bytes)
        numbers = host.numpy()
        end = 0
        for name, array in arrays.items():
            at = places.by_name[name]
            assert array.size <= at.capacity, f"{array.size} {name} where {at.capacity} fit"
            assert array.dtype == at.dtype, f"{name} are {array.dtype}, not {at.dtype}"
            stop = at.offset + array.nbytes
            numbers[at.offset : stop].view(at.dtype)[:] = array.reshape(-1)
            end = max(end, stop)
        if end:
            self._device.copy(buffer[:end], host[:end])
            self.num_copies += 1
        self._under_way.append((self._device.mark(), host))

    def make_room(self, num_bytes: int) -> None:
        """Pins buffers for arrays of so many bytes now. Later, the host would wait while memory is pinned."""
        for _ in range(_BUFFERS):
            self._free.append(self._host_buffer(num_bytes))

    def copy_new(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        """Copies arrays into memory of their own: flat tensors."""
        places = Places.for_arrays(arrays)
        buffer = torch.empty(places.num_bytes, dtype=torch.uint8, device=self.device)
        self.copy(arrays, places, buffer)
        return places.views(buffer)

    def _host_buffer(self, num_bytes: int) -> torch.Tensor:
        """A pinned buffer that no copy still reads."""
        if not self._free:
            mark, host = self._under_way.popleft()
            if not mark.is_reached():
                mark.wait()
            self._free.append(host)
        host = self._free.popleft()
        return host if len(host) >= num_bytes else self._device.host_buffer(2 * num_bytes)


class Readback:
    """Copies results to pinned memory of the host."""

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._host = device.host_buffer(1 << 12)
        self.num_copies = 0
        """How often it has copied."""

    def reading(
        self, plan: StepPlan, columns_RC: torch.Tensor | None, rows: Sequence[int] | None = None
    ) -> Reading:
        """Starts the copy of the columns of a plan's rows. rows: those that are the plan's, if not all are.

        The reading must be called before the next one is made.
        """
        if columns_RC is None:
            return lambda: ((), ())
        if len(self._host) < columns_RC.nbytes:
            self._host = self._device.host_buffer(2 * columns_RC.nbytes)
        host_RC = self._host[: columns_RC.nbytes].view(torch.float64).view(columns_RC.shape)
        self._device.copy(host_RC, columns_RC)
        self.num_copies += 1
        mark = self._device.mark()

        def results() -> Results:
            if not mark.is_reached():
                mark.wait()
            numbers_RC = host_RC.numpy()
            return results_of(plan, numbers_RC if rows is None else numbers_RC[list(rows)])

        return results
