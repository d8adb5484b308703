"""The data plane: hidden states from each stage to the next. Never a decision.

Shapes come from the plan, so there are no headers and no handshakes: a frame is (plan.num_tokens, D)
contiguous elements in the stages' dtype. T tokens, D width.

    local   all stages in one process, one thread each
    shm     processes of one host (Linux): puts into shared memory, one byte on a socket per arrival
    gloo    processes anywhere, CPU or GPU (staged through host memory)
    nccl    one GPU per stage

Tensor ranks of one stage exchange slices by a gather of the same name (`gather`).
"""

from __future__ import annotations

import parallel_state
from ppserve.errors import ConfigError
from ppserve.stage.transport.frames import MAX_ROWS, Frames, Transport
from ppserve.stage.transport.local import connect
from ppserve.stage.transport.nccl import StreamPassage
from ppserve.stage.transport.point_to_point import Passage, PinnedPassage, PointToPoint
from ppserve.stage.transport.shm import SharedMemoryTransport

__all__ = ["MAX_ROWS", "Frames", "Transport", "connect", "create_transport"]


def create_transport(name: str, frames: Frames) -> Transport:
    """The transport `shm`, `gloo` or `nccl` for this rank's place in `parallel_state.get_pp_group()`.

    A collective call: every stage makes it, with the same frames but for the device.
    A single stage gets `local` whatever the name.
    Raises ConfigError when the name does not connect processes, TransportError when a neighbour is gone.
    """
    if not parallel_state.model_parallel_is_initialized() or parallel_state.get_pp_group().world_size == 1:
        return connect((frames,))[0]
    group = parallel_state.get_pp_group()
    if name == "shm":
        return SharedMemoryTransport(frames, group)
    if name == "gloo":
        passage = Passage() if frames.device.type == "cpu" else PinnedPassage(frames.device)
        return PointToPoint(name, frames, group, passage)
    if name == "nccl":
        return PointToPoint(name, frames, group, StreamPassage(frames.device))
    raise ConfigError("--transport", f"{name!r} does not connect processes; choose shm, gloo or nccl")
