"""The gather over a group of torch.distributed: gloo between any processes, NCCL between GPUs.

A group's all-gather wants parts of one size, so narrower ones are padded. Bytes are gathered, whatever they mean:
gloo does not know all of torch's numbers.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.nn.functional import pad

import parallel_state
from parallel_state import ParallelGroup
from ppserve.core.architecture import Cut
from ppserve.stage.transport.gather import TensorLink
from ppserve.stage.transport.gather_shm import shm_gather
from ppserve.stage.transport.nccl import AbortedPassage
from ppserve.stage.transport.point_to_point import GroupUser, Passage


class GroupGather(GroupUser):
    """A gather in one group. waited_ns: with gloo, the time of the exchange as well; with NCCL nothing, since the
    GPU waits and not the host."""

    def __init__(self, name: str, group: ParallelGroup, passage: Passage) -> None:
        super().__init__(name, group, passage)
        self.waited_ns = 0
        self._on_device = name == "nccl"

    def all(self, own_Tn: torch.Tensor, cut: Cut) -> torch.Tensor:
        of_host_Tn = own_Tn if self._on_device else own_Tn.cpu()
        begun_ns = time.monotonic_ns()  # its own device is done: from here on it waits for others
        padded = pad(of_host_Tn, (0, max(cut.widths) - cut.width)).contiguous()
        parts = [torch.empty_like(padded) for _ in cut.widths]
        with self._exchange():
            dist.all_gather(
                [part.view(torch.uint8) for part in parts], padded.view(torch.uint8), self._group.process_group
            )
        self._check_open()
        if not self._on_device:
            self.waited_ns += time.monotonic_ns() - begun_ns
        whole_TN = torch.cat([part[:, :width] for part, width in zip(parts, cut.widths, strict=True)], 1)
        return whole_TN.to(own_Tn.device)


def create_gather(name: str) -> TensorLink:
    """The gather that goes with the transport `shm`, `gloo` or `nccl`, in `parallel_state.get_tp_group()`.

    A collective call: every tensor rank of the stage makes it. Raises TransportError when a rank is gone.
    """
    group = parallel_state.get_tp_group()
    if name == "shm":
        return shm_gather(group)
    return GroupGather(name, group, AbortedPassage() if name == "nccl" else Passage())
