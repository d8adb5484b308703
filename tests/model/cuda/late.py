"""A device that is as late as a device may be: it does nothing before somebody waits for it.

What it computes is computed at once, by the CPU, but its copies are not. One to the host leaves what is no number
there until a mark behind it is waited for. One from the host finds fault, at that moment, if the host has written
to its source meanwhile: the device had not read it yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ppserve.model.cuda.device import Accelerator

NO_NUMBER = 0xFF
"""The value of every byte: a float64 of it is no number, a token id is -1."""


class LateDevice(Accelerator):
    """num_waits: how often somebody had to wait."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._num_given = self._num_done = 0
        self._under_way: deque[tuple[int, Callable[[], object]]] = deque()
        self._hosts: dict[int, torch.Tensor] = {}
        self._is_recording = False

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        # Kept, so that no later one has its address: what still reads or writes it would go unseen.
        buffer = super().host_buffer(num_bytes)
        self._hosts[buffer.data_ptr()] = buffer
        return buffer

    @torch.inference_mode()
    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        assert not self._is_recording, "it would be repeated whatever is in the host's memory then"
        assert self._is_of_host(to) != self._is_of_host(source), "one side is a host buffer"
        kept = source.clone()
        self._num_given += 1

        def check() -> None:
            assert torch.equal(source, kept), "the host has changed what a copy had not read yet"

        if self._is_of_host(to):
            to.view(torch.uint8).fill_(NO_NUMBER)
            self._under_way.append((self._num_given, lambda: to.copy_(kept)))
        else:
            to.copy_(kept)
            self._under_way.append((self._num_given, check))

    def mark(self) -> LateMark:
        self._num_given += 1
        return LateMark(self, self._num_given)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self._is_recording = True
        try:
            return super().record(work)
        finally:
            self._is_recording = False

    def is_done(self, number: int) -> bool:
        return number <= self._num_done

    @torch.inference_mode()
    def do(self, number: int) -> None:
        """Everything up to this."""
        self._num_done = max(self._num_done, number)
        while self._under_way and self.is_done(self._under_way[0][0]):
            self._under_way.popleft()[1]()

    def _is_of_host(self, numbers: torch.Tensor) -> bool:
        return numbers.untyped_storage().data_ptr() in self._hosts


@dataclass(frozen=True)
class LateMark:
    device: LateDevice
    number: int

    def wait(self) -> None:
        if not self.device.is_done(self.number):
            self.device.num_waits += 1
            self.device.do(self.number)
