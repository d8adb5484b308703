"""`--parallel auto`: the shape of the ranks that are here, by what they measured and a formula predicts."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ppserve import wire
from ppserve.config import CPU_KV_SHARE, PipelineSettings, ServeConfig
from ppserve.core.partition import PartCosts, mean
from ppserve.errors import ConfigError, UsageError
from ppserve.head.engine.control import SocketControlPlane
from ppserve.head.engine.member import FatalError
from ppserve.head.starting import WaitLimit, wait_for_hellos
from ppserve.planning.forecast import Intent
from ppserve.planning.shapes import Conditions, Prospect, compare, render_prospects, shape_name

log = logging.getLogger("ppserve.head")

_BETWEEN_HOSTS = {"latency_s": 200e-6, "return_s": 1e-3}
_ANY_MEMORY = 1 << 62


def choose_shape(
    config: ServeConfig, control: SocketControlPlane, world_size: int, is_stopping: Callable[[], bool]
) -> PipelineSettings | FatalError:
    """The settings with the best shape, once every rank has measured; why the server must end where none can be
    chosen. A rank that cannot serve, or a signal, is the engine's to handle: then the settings are unchanged."""
    limit = WaitLimit(config.server.start_timeout_s, time.monotonic())
    hellos = wait_for_hellos(control, world_size, limit, is_stopping)
    if isinstance(hellos, FatalError):
        return hellos
    if not hellos:
        return config.pipeline
    try:
        found = compare_shapes(config, hellos)
    except UsageError as error:
        return FatalError(str(error), usage=True)
    grid = found[0].grid
    callers = config.scheduling.expect.callers
    print(f"predicted for {callers} callers:\n{render_prospects(found)}", file=sys.stderr, flush=True)
    log.info("--parallel auto: %s", shape_name(grid))
    return replace(config.pipeline, tensor_parallel=grid.tensor, replicas=grid.data)


def compare_shapes(config: ServeConfig, hellos: Sequence[wire.Hello]) -> list[Prospect]:
    """What every shape of these ranks promises for the expected load, the best first.

    Raises ConfigError where none fits.
    """
    measured = [hello.costs for hello in hellos]
    if any(costs.keys() != hellos[0].costs.keys() for costs in measured):
        raise ConfigError("--parallel", "auto: not every rank was started with it")
    means = {count: mean(tuple(costs[count] for costs in measured)) for count in hellos[0].costs}
    under = Conditions(
        stage_s=lambda layout, step: means[layout.num_tensor].stage_cost(layout),
        num_cores=_num_cores(config, hellos) if _on_cpus(hellos) else math.inf,
        **({} if len({hello.host.machine for hello in hellos}) == 1 else _BETWEEN_HOSTS),
    )
    try:
        return compare(hellos[0].model.architecture, _intent(config, hellos, means[1]), len(hellos), under)
    except ConfigError as error:
        if error.name != "--world":
            raise
        raise ConfigError("--parallel", f"auto: {str(error).removeprefix('--world: ')}") from None


def _intent(config: ServeConfig, hellos: Sequence[wire.Hello], parts: PartCosts) -> Intent:
    """What is to be served, and the memory of the rank that has least."""
    model = hellos[0].model
    return Intent(
        num_stages=1,
        parts=parts,
        dtype=model.dtype,
        quantization=model.quantization,
        kv_dtype=model.kv_dtype,
        max_model_len=config.model.max_model_len,
        block_size=config.cache.block_size,
        stage_memory=min(hello.device.memory_bytes or _ANY_MEMORY for hello in hellos),
        kv_cache_memory=min(hello.device.kv_bytes for hello in hellos),
        kv_share=CPU_KV_SHARE if _on_cpus(hellos) and config.cache.kv_cache_memory is None else 1.0,
        expect=config.scheduling.expect,
    )


def _on_cpus(hellos: Sequence[wire.Hello]) -> bool:
    return any(hello.device.gpu is None for hello in hellos)


def _num_cores(config: ServeConfig, hellos: Sequence[wire.Hello]) -> float:
    """How many ranks can compute at the same time: the cores of all machines, by the threads of a rank."""
    machines = [hello.host.machine for hello in hellos]
    cores = [hello.host.cores / machines.count(hello.host.machine) for hello in hellos]  # that each rank can have
    return sum(each / (config.pipeline.threads or max(1, int(each))) if each else 1 for each in cores)
