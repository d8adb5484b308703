"""The data plane: hidden states from each stage to the next. Never a decision.

Shapes come from the plan, so there are no headers and no handshakes: a frame is (plan.num_tokens, D) contiguous
numbers in the stages' dtype. T tokens, D width.

    local   stages that are threads of one process
    shm     processes of one host (Linux): puts into shared memory, and one byte on a socket for each arrival
    gloo    processes anywhere, with CPUs, or with GPUs by way of host memory
    nccl    stages with a GPU each

The tensor ranks of a stage exchange columns by a gather with the same name (`gather`). The table `KINDS` has all
that differs between the transports of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ppserve.errors import ConfigError
from ppserve.stage.parallel_state import ParallelGroup
from ppserve.stage.transport import nccl
from ppserve.stage.transport.frames import MAX_ROWS, Frames, Transport
from ppserve.stage.transport.gather import GroupGather, StageGather, connect_shared_memory
from ppserve.stage.transport.local import connect
from ppserve.stage.transport.point_to_point import GroupBackend, PinnedGlooBackend, PointToPoint
from ppserve.stage.transport.shm import SharedMemoryTransport

__all__ = ["MAX_ROWS", "Frames", "Transport", "connect", "create_gather", "create_transport", "kind_of"]


@dataclass(frozen=True, slots=True)
class TransportKind:
    """One way to connect the processes of a pipeline."""

    create: Callable[[Frames, ParallelGroup], Transport]
    """Connects this stage to its neighbours. All ranks of the pipeline's group call it. Raises TransportError."""
    create_gather: Callable[[ParallelGroup], StageGather]
    """Connects this rank to the other tensor ranks of its stage, which all call it. Raises TransportError."""
    group_backend: str = "gloo"
    """The backend of torch.distributed for the epoch's groups, in which processes find each other."""
    prepare: Callable[[], None] = lambda: None
    """Is called before the epoch's groups are made."""


def _gloo(frames: Frames, group: ParallelGroup) -> Transport:
    backend = GroupBackend() if frames.device.type == "cpu" else PinnedGlooBackend(frames.device)
    return PointToPoint("gloo", frames, group, backend)


def _nccl(frames: Frames, group: ParallelGroup) -> Transport:
    return PointToPoint("nccl", frames, group, nccl.NcclStreamBackend(frames.device))


KINDS = {
    "shm": TransportKind(SharedMemoryTransport, connect_shared_memory),
    "gloo": TransportKind(_gloo, lambda group: GroupGather("gloo", group, GroupBackend())),
    "nccl": TransportKind(
        _nccl, lambda group: GroupGather("nccl", group, nccl.NcclBackend()), "nccl", nccl.quiet_watchdog
    ),
}
"""The transports between processes, by the name that `--transport` gives them."""


def kind_of(name: str) -> TransportKind:
    """Return the transport's entry in `KINDS`. Raises ConfigError for a name that does not connect processes."""
    if name not in KINDS:
        *others, last = KINDS
        choices = f"{', '.join(others)} or {last}"
        raise ConfigError("--transport", f"{name!r} does not connect processes; choose {choices}")
    return KINDS[name]


def create_transport(name: str, frames: Frames, group: ParallelGroup | None) -> Transport:
    """Create the transport `shm`, `gloo` or `nccl` for this rank's place in a pipeline.

    group: the pipeline's stages (`parallel_state.get_pp_group()`). With None, or a group of one stage, it is
    `local` whatever the name. Every stage must call this, with frames that differ only in their device. Raises
    ConfigError if the name does not connect processes, and TransportError if a neighbour is gone.
    """
    if group is None or group.world_size == 1:
        return connect((frames,))[0]
    return kind_of(name).create(frames, group)


def create_gather(name: str, group: ParallelGroup) -> StageGather:
    """Create the gather `shm`, `gloo` or `nccl` for one of a stage's tensor ranks.

    group: these ranks (`parallel_state.get_tp_group()`), which must all call this. Raises the same as
    `create_transport`.
    """
    return kind_of(name).create_gather(group)
