"""The arrays of a step on their way to the device: one pinned buffer, one copy that nobody waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.model.cuda.device import Accelerator, Mark

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
    """Where an array lies in the buffer; `capacity` counts elements."""

    offset: int
    dtype: np.dtype[Any]
    capacity: int


@dataclass(frozen=True, slots=True)
class Places:
    """Of all arrays of a step. num_bytes: of the whole buffer."""

    of: Mapping[str, Place]
    num_bytes: int

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
            for name, at in self.of.items()
        }


class Staging:
    """Used by one thread. num_copies: how often it has copied."""

    def __init__(self, device: Accelerator) -> None:
        self.device = device.device
        self._device = device
        self._free: deque[torch.Tensor] = deque(device.host_buffer(1 << 16) for _ in range(_BUFFERS))
        self._under_way: deque[tuple[Mark, torch.Tensor]] = deque()
        self.num_copies = 0

    def put(self, arrays: Arrays, places: Places, buffer: torch.Tensor) -> None:
        """Copies arrays into a buffer of the device, each to its place. What lies behind an array stays as it
        was."""
        host = self._host_buffer(places.num_bytes)
        numbers = host.numpy()
        end = 0
        for name, array in arrays.items():
            at = places.of[name]
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
        """For arrays of so many bytes, at once: later, the host would wait while memory is pinned."""
        for _ in range(_BUFFERS):
            self._free.append(self._host_buffer(num_bytes))

    def put_new(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        """Copies arrays into memory of their own: flat tensors."""
        places = Places.for_arrays(arrays)
        buffer = torch.empty(places.num_bytes, dtype=torch.uint8, device=self.device)
        self.put(arrays, places, buffer)
        return places.views(buffer)

    def _host_buffer(self, num_bytes: int) -> torch.Tensor:
        """A pinned buffer that no copy reads any more."""
        if not self._free:
            mark, host = self._under_way.popleft()
            if not mark.is_reached():
                mark.wait()
            self._free.append(host)
        host = self._free.popleft()
        return host if len(host) >= num_bytes else self._device.host_buffer(2 * num_bytes)
