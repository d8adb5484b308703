"""Hidden states over gloo: any processes, any network, CPU or GPU.

Gloo carries host memory, so a GPU's hidden states pass through a pinned buffer; the copy out is finished
before the send is posted, because gloo knows nothing of streams.

A posted receive can be cancelled only by the neighbour's end of the connection: an interrupted stage goes
on waiting until the neighbour leaves the group or is killed, or for the group's timeout.
"""

from __future__ import annotations

import torch

from ppserve.stage.transport.frames import Frames
from ppserve.stage.transport.point_to_point import Passage


class PinnedPassage(Passage):
    """The stage computes on a GPU: frames are copied through pinned host memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def buffer(self, frames: Frames) -> torch.Tensor:
        return frames.empty(torch.device("cpu"), pin_memory=True)

    def to_backend(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        # A blocking copy: the bytes are on the host when it returns.
        return torch.empty(hidden_TD.shape, dtype=hidden_TD.dtype, pin_memory=True).copy_(hidden_TD)

    def to_stage(self, buffer_TD: torch.Tensor) -> torch.Tensor:
        # Blocking as well: afterwards the buffer may receive the next frame.
        return buffer_TD.to(self._device)
