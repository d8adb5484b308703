"""Copies, events and graphs of a device that computes beside the host.

Work goes to the calling thread's current stream. A step has two copies: its arrays to the device, for which the
host does not wait, and what it has drawn to the host, for which it waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from ppserve.core.plan import StepPlan
from ppserve.model.backend import HostTiming, Reading, Results, Timing
from ppserve.model.cuda.sampling import results_of


class Mark(Protocol):
    """A point in the work that was given to a device."""

    def wait(self) -> None:
        """Return when the device has done the work up to this point. Later work continues meanwhile."""


class Accelerator:
    """The CPU in a GPU's place: all work is done when its call returns. `CudaDevice` overrides every method."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_waits = 0
        """How often the host has waited for unfinished work."""

    @property
    def name(self) -> str:
        return f"torch for {torch.backends.cpu.get_cpu_capability()}, as a GPU's reference"

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Return host memory that the device can copy from and to by itself."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy. The host's memory must be neither read nor written until a later mark has been waited
        for."""
        to.copy_(source)

    def mark(self) -> Mark:
        """Return a mark at the end of the work that was given so far."""
        return self

    def wait(self) -> None:
        """Return at once: no work is left to be done."""

    def timing(self) -> Timing:
        """Begin to time a step, whose work begins now."""
        return HostTiming()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record work, which must use the same memory every time. Return a function that repeats it. The work is
        called several times."""
        work()
        return work


_RECORDING = threading.Lock()
"""It is held while a graph is recorded, because torch's bookkeeping for that belongs to the whole process."""


class CudaDevice(Accelerator):
    """A GPU. Its graphs share one pool of memory, because they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._pool: object | None = None
        self._recording: torch.cuda.Stream | None = None

    @property
    def name(self) -> str:
        return f"torch {torch.__version__} for {torch.cuda.get_device_name(self.device)}"

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        return _CudaMark(self, torch.cuda.current_stream(self.device).record_event())

    def timing(self) -> Timing:
        return CudaTiming(self)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        with _RECORDING:
            return self._record(work)

    def _record(self, work: Callable[[], None]) -> Callable[[], None]:
        # A stream of this stage's own, because torch's default one is the same for all threads.
        stream = self._recording = self._recording or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        # The first calls compile kernels and set up operators, which must not be recorded.
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may use the device meanwhile.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode=mode):  # type: ignore[arg-type]
            work()
        self._pool = self._pool or graph.pool()
        return graph.replay


class _CudaMark:
    def __init__(self, device: CudaDevice, event: torch.cuda.Event) -> None:
        self._device, self._event = device, event

    def wait(self) -> None:
        if not self._event.query():  # type: ignore[no-untyped-call]
            self._device.num_waits += 1
            self._event.synchronize()


class CudaTiming:
    """A step's time on the GPU: from when it began the step's first work to when it had done the last.

    Events give only the time between them. So the end is taken as the time at which the host saw it.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        stream = torch.cuda.current_stream(device.device)
        self._begun = stream.record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self._ended = self._begun

    def computed(self) -> None:
        stream = torch.cuda.current_stream(self._device.device)
        self._ended = stream.record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]

    def busy_ns(self) -> tuple[int, int]:
        _CudaMark(self._device, self._ended).wait()
        ended_ns = time.monotonic_ns()
        return ended_ns - int(self._begun.elapsed_time(self._ended) * 1e6), ended_ns


Arrays = Mapping[str, NDArray[Any]]

_ALIGNMENT = 16
_BUFFERS = 3
"""So many copies may be under way before the host waits for the oldest."""
_BUFFER_BYTES = 1 << 20
"""The size of a buffer at first. If it must be replaced by a larger one, pinning that makes the host wait."""


def packed_bytes(arrays: Arrays) -> int:
    """Return the bytes that these arrays take one after the other."""
    return sum(_aligned(array.nbytes) for array in arrays.values())


class Staging:
    """Copies arrays to the device by way of pinned buffers. It is for one thread."""

    def __init__(self, device: Accelerator) -> None:
        self.device = device.device
        self._device = device
        self._free: deque[torch.Tensor] = deque(device.host_buffer(_BUFFER_BYTES) for _ in range(_BUFFERS))
        self._under_way: deque[tuple[Mark, torch.Tensor]] = deque()

    def copy(self, arrays: Arrays, buffer: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Copy arrays to the device, by one copy. Return them there, flattened. buffer: where to; in the same
        buffer, arrays of the same sizes have the same addresses."""
        num_bytes = packed_bytes(arrays)
        host = self._host_buffer(num_bytes)
        to = torch.empty(num_bytes, dtype=torch.uint8, device=self.device) if buffer is None else buffer
        assert num_bytes <= len(to), f"{num_bytes} bytes where {len(to)} fit"
        numbers = host.numpy()
        tensors = dict[str, torch.Tensor]()
        begin = 0
        end = 0
        for name, array in arrays.items():
            end = begin + array.nbytes
            numbers[begin:end].view(array.dtype)[:] = array.reshape(-1)
            tensors[name] = to[begin:end].view(getattr(torch, array.dtype.name))
            begin += _aligned(array.nbytes)
        if end:  # without the padding of the last array, behind which the buffer may hold older block tables
            self._device.copy(to[:end], host[:end])
        self._under_way.append((self._device.mark(), host))
        return tensors

    def _host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Return a pinned buffer that no copy reads any more."""
        if not self._free:
            mark, host = self._under_way.popleft()
            mark.wait()
            self._free.append(host)
        host = self._free.popleft()
        if len(host) >= num_bytes:
            return host
        return self._device.host_buffer(2 * num_bytes)


class Readback:
    """Copies results to pinned memory of the host."""

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._host = device.host_buffer(1 << 12)

    def reading(self, plan: StepPlan, columns_RC: torch.Tensor | None) -> Reading:
        """Begin to copy a plan's columns to the host. The returned reading waits for that copy. There is one
        buffer, so read the results before the next call."""
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
