"""Copies, events and graphs of a device that computes beside the host.

Work is given to the calling thread's current stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

from ppserve.model.timing import Busy, HostTiming, Timing


class Mark(Protocol):
    """A point in the work that was given to a device."""

    def wait(self) -> None:
        """Returns when the device has come so far. Work that was given later continues meanwhile."""


class Accelerator:
    """The CPU in a GPU's place: it does at once what a GPU does later. `CudaDevice` overrides all of it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_waits = 0
        """How often the host has waited for work that was not done."""

    @property
    def name(self) -> str:
        return f"torch for {torch.backends.cpu.get_cpu_capability()}, as a GPU's reference"

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Bytes of host memory that the device can copy from and to by itself."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copies between a host buffer and the device, behind all work that was given, without a wait. Until a
        later mark is reached, the host's side must be neither read nor written."""
        to.copy_(source)

    def mark(self) -> Mark:
        """The end of the work that was given so far."""
        return self

    def wait(self) -> None:
        """Nothing is left to be done."""

    def timing(self) -> Timing:
        """A step's work begins now."""
        return HostTiming()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Records a function's work, which must use the same memory every time. The result repeats it.

        The function is called several times.
        """
        work()
        return work


_RECORDING = threading.Lock()
"""Stages may be threads of one process. torch's bookkeeping of a graph that is being recorded (synchronisation,
random state, garbage collection) is the process's."""


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
        # A stream of this stage's own: torch's default is one for all threads.
        stream = self._recording = self._recording or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        # Compiling, and whatever an operator sets up when it is first called, must not be recorded.
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may be at work on the device.
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


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class CudaTiming:
    """A step's time on the GPU itself: from when it reached the step's first work to when the last was done.

    Events know the time between them, not the time of day: the end is when the host saw it.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        stream = torch.cuda.current_stream(device.device)
        self._begun = stream.record_event(_timed_event())
        self._ended = self._begun

    def computed(self) -> None:
        stream = torch.cuda.current_stream(self._device.device)
        self._ended = stream.record_event(_timed_event())

    def busy(self) -> Busy:
        _CudaMark(self._device, self._ended).wait()
        ended_ns = time.monotonic_ns()
        return Busy(ended_ns - int(self._begun.elapsed_time(self._ended) * 1e6), ended_ns)
