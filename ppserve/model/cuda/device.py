"""Copies, events and graphs of a device that computes beside the host.

Work goes to the calling thread's current stream. A step has two copies: its arrays to the device, without a wait,
and what it draws back, the only wait.
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
        """Returns when the device has come so far. Later work continues meanwhile."""


class Accelerator:
    """The CPU in a GPU's place, at once. `CudaDevice` overrides all of it."""

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
        """Copies without a wait. Leave the host's side alone until a later mark."""
        to.copy_(source)

    def mark(self) -> Mark:
        """Return the end of the work that was given so far."""
        return self

    def wait(self) -> None:
        """Return at once: no work is left to be done."""

    def timing(self) -> Timing:
        """Begin to time a step, whose work begins now."""
        return HostTiming()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Records work, which uses the same memory every time, by several calls."""
        work()
        return work


_RECORDING = threading.Lock()
"""torch's bookkeeping of a recorded graph is the process's."""


class CudaDevice(Accelerator):
    """A GPU. Graphs share one pool of memory: they never run at the same time."""

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
        # This stage's own: torch's default is one for all threads.
        stream = self._recording = self._recording or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        # Compiling, and an operator's first set-up, must not be recorded.
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may use the device.
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
    """A step's time on the GPU: from when it reached the step's first work to when the last was done.

    Events know only the time between them: the end is when the host saw it.
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
"""Copies that may be under way before the host waits for the oldest."""
_BUFFER_BYTES = 1 << 20
"""Size of a buffer at first: pinning a larger one makes the host wait."""


def packed_bytes(arrays: Arrays) -> int:
    """Return the bytes that these arrays take one after the other."""
    return sum(_aligned(array.nbytes) for array in arrays.values())


class Staging:
    """Copies arrays to the device by way of pinned buffers. Used by one thread."""

    def __init__(self, device: Accelerator) -> None:
        self.device = device.device
        self._device = device
        self._free: deque[torch.Tensor] = deque(device.host_buffer(_BUFFER_BYTES) for _ in range(_BUFFERS))
        self._under_way: deque[tuple[Mark, torch.Tensor]] = deque()

    def copy(self, arrays: Arrays, buffer: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Copies arrays at once, flat. In one buffer, equal sizes have equal addresses."""
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
        if end:  # not the last array's padding: behind it the buffer holds older block tables
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
        if len(host) >= num_bytes:
            return host
        return self._device.host_buffer(2 * num_bytes)


class Readback:
    """Copies results to pinned memory of the host."""

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._host = device.host_buffer(1 << 12)

    def reading(self, plan: StepPlan, columns_RC: torch.Tensor | None) -> Reading:
        """Starts the copy of a plan's columns. Call it before the next is made."""
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
