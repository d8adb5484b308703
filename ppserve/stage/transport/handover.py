"""Hidden states that one thread's stream makes and another's uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Handover:
    """made: on a GPU, an event after the work that makes them; None on CPUs, where the work is done."""

    hidden_TD: torch.Tensor
    made: torch.cuda.Event | None

    @classmethod
    def of(cls, hidden_TD: torch.Tensor) -> Handover:
        """By the thread that makes them. Nobody waits."""
        if not hidden_TD.is_cuda:
            return cls(hidden_TD, None)
        return cls(hidden_TD, torch.cuda.current_stream(hidden_TD.device).record_event())

    def taken(self, device: torch.device) -> torch.Tensor:
        """On the device of the thread that takes them; its stream waits, the thread does not."""
        if self.made is not None:
            # On the device that holds them: a copy to another device is made there too.
            stream = torch.cuda.current_stream(self.hidden_TD.device)
            stream.wait_event(self.made)
            # Else the maker's stream would reuse their memory as soon as nobody holds them, read or not.
            self.hidden_TD.record_stream(stream)
        return self.hidden_TD.to(device)
