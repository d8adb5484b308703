"""Before the first epoch: how long the head waits for ranks, and which shape they take.

Downloads may take long, so what counts is the time in which nothing happened at any rank. With `--parallel auto`
the head first compares all shapes by what ranks measured.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ppserve import wire
from ppserve.config import PipelineSettings, ServeConfig
from ppserve.core.figures import size
from ppserve.core.partition import PartCosts, mean
from ppserve.errors import ConfigError, StagesLost
from ppserve.head.engine.control import Disconnected, Received
from ppserve.head.engine.control_sockets import SocketControlPlane
from ppserve.head.engine.member import Member, StageState
from ppserve.head.engine.members import Members
from ppserve.planning.forecast import Intent
from ppserve.planning.shapes import Conditions, Prospect, compare, render_prospects, shape_name

log = logging.getLogger("ppserve.head")

TELL_EVERY_S = 30.0
_POLL_S = 0.25
_BETWEEN_HOSTS = {"latency_s": 200e-6, "return_s": 1e-3}
_ANY_MEMORY = 1 << 62
_WHAT = {
    StageState.ABSENT: "has not come: is it started, with the same MASTER_ADDR, --control-port and --secret-file?",
    StageState.LOADING: "loads its weights",
    StageState.FORMING: "connects to its neighbours (--interface, --advertise)",
}


class WaitLimit:
    """The time in which something must happen, and when the log says what is missing."""

    def __init__(self, limit_s: float, now_s: float) -> None:
        self._limit_s = limit_s
        self._seen: object = None
        self._since_s = self._told_s = now_s

    def check(self, seen: object, missing: str, now_s: float) -> StagesLost | None:
        """Why the server must end, if it must. seen: changes when something happens."""
        if seen != self._seen:
            self._seen, self._since_s = seen, now_s
        waited_s = now_s - self._since_s
        if waited_s >= self._limit_s:
            since = f"nothing has happened for {waited_s:.0f} s (--start-timeout)"
            return StagesLost(f"{since}; waiting for {missing}")
        if now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            log.warning("waiting for %s", missing)
        return None


def find_missing(replicas: Sequence[Members]) -> tuple[object, str]:
    """What the ranks have done, and in words what is missing."""
    members = [(replica.grid.name(member.rank), member) for replica in replicas for member in replica.all]
    missing = "; ".join(
        f"{name} (rank {member.rank}), which {_WHAT[member.state]}{_amount(member)}"
        for name, member in members
        if member.state in _WHAT
    )
    return [(member.state, member.progress) for _, member in members], missing or "the epoch to form"


def _amount(member: Member) -> str:
    done, total = member.progress
    return f", {size(done)} of {size(total)}" if member.state is StageState.LOADING and total else ""


def choose_shape(
    config: ServeConfig, control: SocketControlPlane, world_size: int, is_stopping: Callable[[], bool]
) -> PipelineSettings:
    """The best shape, once all ranks have measured. Raises UsageError, StagesLost."""
    limit = WaitLimit(config.server.start_timeout_s, time.monotonic())
    greetings = wait_for_greetings(control, world_size, limit, is_stopping)
    hellos = [greeting for _, greeting in sorted(greetings.items()) if isinstance(greeting, wire.Hello)]
    if len(hellos) < world_size:
        return config.pipeline
    found = compare_shapes(config, hellos)
    grid = found[0].grid
    callers = config.scheduling.expect.callers
    print(f"predicted for {callers} callers:\n{render_prospects(found)}", file=sys.stderr, flush=True)
    log.info("--parallel auto: %s", shape_name(grid))
    return replace(config.pipeline, tensor_parallel=grid.tensor, replicas=grid.data)


def wait_for_greetings(
    control: SocketControlPlane, world_size: int, limit: WaitLimit, is_stopping: Callable[[], bool]
) -> dict[int, wire.FromStage]:
    """Every rank's first message, unless one fails or the server stops. Raises StagesLost."""
    greetings: dict[int, Received] = {}
    while len(greetings) < world_size and not is_stopping():
        control.send(greetings, wire.Ping(time.monotonic_ns()))  # a stage that receives nothing ends itself
        for event in control.poll(_POLL_S):
            if isinstance(event, Disconnected):
                greetings.pop(event.rank, None)
            elif isinstance(event.message, wire.Hello | wire.Failed):
                greetings[event.rank] = event
        if any(isinstance(greeting.message, wire.Failed) for greeting in greetings.values()):
            break
        missing = ", ".join(f"rank {rank}" for rank in range(world_size) if rank not in greetings)
        what = f"{missing}, which {_WHAT[StageState.ABSENT]} Or it measures still (--parallel auto)"
        if error := limit.check(set(greetings), what, time.monotonic()):
            raise error
    control.put_back(list(greetings.values()))
    return {rank: greeting.message for rank, greeting in greetings.items()}


def compare_shapes(config: ServeConfig, hellos: Sequence[wire.Hello]) -> list[Prospect]:
    """What each shape promises, best first. Raises ConfigError where none fits."""
    measured = [hello.costs for hello in hellos]
    if any(costs.keys() != hellos[0].costs.keys() for costs in measured):
        raise ConfigError("--parallel", "auto: not every rank was started with it")
    means = {count: mean(tuple(costs[count] for costs in measured)) for count in hellos[0].costs}
    under = Conditions(
        stage_s=lambda layout, step: means[layout.num_tensor].stage_cost(layout),
        num_cores=_num_cores(config, hellos) if _on_cpus(hellos) else math.inf,
        **({} if len({hello.host.machine for hello in hellos}) == 1 else _BETWEEN_HOSTS),
    )
    return compare(hellos[0].model.architecture, _intent(config, hellos, means[1]), len(hellos), under)


def _intent(config: ServeConfig, hellos: Sequence[wire.Hello], parts: PartCosts) -> Intent:
    """What is to be served, with the memory of the smallest rank."""
    model = hellos[0].model
    shares_memory = _on_cpus(hellos) and config.cache.kv_cache_memory is None
    return Intent(
        num_stages=1,
        parts=parts,
        dtype=model.dtype,
        quantization=model.quantization,
        kv_dtype=model.kv_dtype,
        max_model_len=config.model.max_model_len,
        block_size=config.cache.block_size,
        stage_memory=min(hello.device.memory_bytes or _ANY_MEMORY for hello in hellos),
        kv_cache_memory=None if shares_memory else min(hello.device.kv_bytes for hello in hellos),
        shares_memory=shares_memory,
        expect=config.scheduling.expect,
    )


def _on_cpus(hellos: Sequence[wire.Hello]) -> bool:
    return any(hello.device.gpu is None for hello in hellos)


def _num_cores(config: ServeConfig, hellos: Sequence[wire.Hello]) -> float:
    """How many ranks can compute at once: all machines' cores by a rank's threads."""
    machines = [hello.host.machine for hello in hellos]
    cores = [hello.host.cores / machines.count(hello.host.machine) for hello in hellos]  # that each rank can have
    return sum(each / (config.pipeline.threads or max(1, int(each))) if each else 1 for each in cores)
