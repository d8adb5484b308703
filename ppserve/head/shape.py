"""`--parallel auto`: the shape of the ranks that are here, by what they measured and the simulator predicts."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ppserve import wire
from ppserve.config import CPU_KV_SHARE, PipelineSettings, ServeConfig
from ppserve.core.cost_model import LayerCosts
from ppserve.core.scheduling.config import MAX_PROMPT_TOKENS_PER_STEP
from ppserve.errors import ConfigError, UsageError
from ppserve.head.engine.member import FatalError
from ppserve.head.engine.placement import CPU_CHUNK
from ppserve.head.engine.startup_barrier import BarrierControl, wait_for_hellos
from ppserve.head.starting import WaitLimit, missing_ranks
from ppserve.planning.cores import SharedCores
from ppserve.planning.forecast import Intent
from ppserve.planning.machine import Wires
from ppserve.planning.scenarios import MeasuredCosts, fixed_load
from ppserve.planning.shapes import Conditions, Prospect, prospects, render_prospects, shape_name

log = logging.getLogger("ppserve.head")

# Requests simulated for each caller: enough that the first and the last ones weigh little.
_REQUESTS_PER_CALLER = 4
# What ranks compute around each step they have measured. A lone one's is interpreted code and system calls, as is
# what the head does for each step, for each rank's result of it and for each token, what a stage does to hand
# hidden states on, and what a caller in Python does for each token. These are in proportion to it
# (docs/performance.md).
_STEP, _REPORT, _TOKEN, _SENDING, _CALLER = 0.30, 0.38, 0.24, 0.18, 0.25
# And so is a gather on one host: what each rank does for it, and where cores are shared what waiting costs.
_GATHER, _SPIN = 0.011, 0.017
_ONE_HOST = Wires(latency_s=50e-6, bandwidth=5e9)
_SEVERAL_HOSTS = Wires(latency_s=200e-6, bandwidth=1e9, gather_s=200e-6)
_LOCAL = ("localhost", "127.0.0.1", "::1")
_ANY_MEMORY = 1 << 62


def choose_shape(
    config: ServeConfig, control: BarrierControl, world_size: int, is_stopping: Callable[[], bool]
) -> PipelineSettings | FatalError:
    """The settings with the best shape, once every rank has measured; why the server must end where none can be
    chosen. A rank that cannot serve, or a signal, is the engine's to handle: then the settings are unchanged."""
    limit = WaitLimit(config.server.start_timeout_s, time.monotonic())
    fatal: FatalError | None = None

    def is_over(missing: list[int]) -> bool:
        nonlocal fatal
        fatal = limit.look(missing, lambda: missing_ranks(missing), time.monotonic())
        return fatal is not None or is_stopping()

    hellos = wait_for_hellos(control, world_size, is_over)
    if not hellos:
        return fatal or config.pipeline
    try:
        found = compare_shapes(config, hellos)
    except UsageError as error:
        return FatalError(str(error), usage=True)
    grid = found[0].grid
    callers = config.scheduling.expect_callers
    print(f"predicted for {callers} callers:\n{render_prospects(found)}", file=sys.stderr, flush=True)
    log.info("--parallel auto: %s", shape_name(grid))
    return replace(config.pipeline, tensor_parallel=grid.tensor, replicas=grid.data)


def compare_shapes(config: ServeConfig, hellos: Sequence[wire.Hello]) -> list[Prospect]:
    """What every shape of these ranks promises for the load that the operator expects, the best first. Raises
    ConfigError where none fits."""
    first, expected = hellos[0], config.scheduling
    measured = [hello.speed for hello in hellos if hello.speed]
    if len(measured) < len(hellos):
        raise ConfigError("--parallel", "auto: not every rank was started with it")
    on_cpus = any(hello.gpu is None for hello in hellos)
    means = {count: LayerCosts.mean([speed[count] for speed in measured]) for count in measured[0]}
    around_s, ends_s = means[1].around_s, means[1].ends_s
    means = {count: replace(costs, ends_s=ends_s) for count, costs in means.items()}
    chunk = CPU_CHUNK if on_cpus else MAX_PROMPT_TOKENS_PER_STEP
    speed = MeasuredCosts(means[1], max_chunk=chunk, shared=means)
    context = first.architecture.context(config.model.max_model_len)
    prompt = min(expected.expect_prompt, context - 1)
    new = min(expected.expect_new, context - prompt)
    callers = expected.expect_callers
    load = fixed_load(_REQUESTS_PER_CALLER * callers, prompt, new, callers)
    whole_s, wires = around_s + ends_s, _SEVERAL_HOSTS
    if len({hello.machine for hello in hellos}) == 1:
        wires = replace(_ONE_HOST, gather_s=_GATHER * whole_s, spin_s=_SPIN * whole_s)
    wires = replace(
        wires,
        head_s=_STEP * whole_s,
        report_s=_REPORT * whole_s,
        telling_s=_TOKEN * whole_s,
        prepare_s=around_s,
        sending_s=_SENDING * whole_s,
    )
    intent = Intent(
        num_stages=1,
        dtype=first.dtype,
        quantization=first.quantization,
        kv_dtype=first.kv_dtype,
        max_model_len=context,
        block_size=config.cache.block_size,
        stage_memory=min(hello.memory_bytes or _ANY_MEMORY for hello in hellos),
        kv_cache_memory=min(hello.kv_bytes for hello in hellos),
        kv_share=CPU_KV_SHARE if on_cpus and config.cache.kv_cache_memory is None else 1.0,
        expect_prompt=prompt,
        expect_new=new,
    )
    hosts = _hosts(config, hellos, _CALLER * whole_s)
    under = Conditions(speed, wires, load, expected.max_num_seqs, hosts=hosts)
    try:
        return prospects(first.architecture, intent, len(hellos), under)
    except ConfigError as error:
        if error.name != "--world":
            raise
        raise ConfigError("--parallel", f"auto: {str(error).removeprefix('--world: ')}") from None


def _hosts(config: ServeConfig, hellos: Sequence[wire.Hello], caller_s: float) -> tuple[SharedCores, ...]:
    """Whose cores the ranks share; none where GPUs compute. caller_s: what a caller computes for a token."""
    if any(hello.gpu is not None or not hello.cores for hello in hellos):
        return ()
    found = []
    for machine in dict.fromkeys(hello.machine for hello in hellos):
        here = [hello for hello in hellos if hello.machine == machine]
        ranks = tuple(hello.rank for hello in here)
        threads = config.pipeline.threads or max(1, here[0].cores // len(here))
        # A server that only its own host can reach has its callers there.
        has_callers = 0 in ranks and config.server.host in _LOCAL
        found.append(SharedCores(here[0].cores, ranks, threads, caller_s if has_callers else 0.0))
    return tuple(found)
