"""Which layers each rank loads, and which transport connects them; decided once all have connected."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ppserve import wire
from ppserve.config import ServeConfig
from ppserve.core.architecture import Split, stage_layouts
from ppserve.core.grid import RankGrid
from ppserve.core.kv_memory import sequence_blocks
from ppserve.core.partition import (
    check_split,
    check_tensor_ranks,
    decode_parts,
    mean,
    split_by_cost,
)
from ppserve.core.scheduling.config import MAX_PROMPT_TOKENS_PER_STEP, SchedulerConfig
from ppserve.errors import ConfigError
from ppserve.head.engine.member import Decision
from ppserve.process.network import is_loopback, local_address

# On CPUs, longer chunks make a token no cheaper, and chunks of one length wait less (docs/performance.md).
CPU_CHUNK = 128


def decide(config: ServeConfig, hellos: Sequence[wire.Hello], split: Split | None = None) -> Decision:
    """Decide the shape of one replica with these ranks, which are in order of stages, then of tensor ranks.

    split: the layers of each stage, of all of them or of the first ones; None = as configured, else balanced.
    Raises ConfigError.
    """
    grid = config.pipeline.grid(hellos[0].world_size)
    arch = hellos[0].model.architecture
    _check_agreement(hellos, grid)
    check_tensor_ranks(arch, grid.tensor)
    measured = tuple(hello.costs for hello in hellos if hello.costs is not None)
    parts = mean(measured) if len(measured) == len(hellos) else None
    costs = parts or decode_parts(arch)
    num_stages = grid.pipeline if split is None else min(grid.pipeline, len(split.sublayers))
    split = split or config.pipeline.layers or split_by_cost(costs, arch.num_layers, num_stages)
    check_split(split, arch, num_stages)
    in_use = hellos[: num_stages * grid.tensor]
    stage_addresses(in_use, grid)
    return Decision(
        layouts=stage_layouts(split),
        transport=_transport(config.pipeline.transport, in_use),
        scheduling=scheduler_config(config, in_use, num_stages),
        parts=parts,
    )


def _check_agreement(hellos: Sequence[wire.Hello], grid: RankGrid) -> None:
    for hello in hellos:
        if found := difference(hellos[0], hello):
            theirs, ours = (f"{grid.name(one.rank)} on {one.host.name}" for one in (hello, hellos[0]))
            flag, what = found
            raise ConfigError(flag, f"{theirs} has {what}, unlike {ours}")


def count_blocks(decision: Decision, loaded: Sequence[wire.Loaded]) -> int:
    """Count KV blocks: what the tightest stage holds, at most max_num_seqs full sequences. Raises ConfigError if
    one does not fit."""
    scheduling = decision.scheduling
    block_size = scheduling.block_size
    context = scheduling.max_model_len
    needed = sequence_blocks(context, block_size)
    can_hold = [stage.kv_bytes // stage.block_bytes for stage in loaded]
    num_blocks = min(can_hold)
    if num_blocks < needed:
        tightest = can_hold.index(num_blocks)
        stage, its = tightest * len(decision.layouts) // len(loaded), loaded[tightest]
        has = f"{its.kv_bytes} bytes for keys and values, room for {num_blocks * block_size} tokens"
        needs = f"one sequence may take {context} ({needed * its.block_bytes} bytes)"
        shorter = f"lower --max-model-len to {num_blocks * block_size}, " if num_blocks else ""
        raise ConfigError(
            "--kv-cache-memory",
            f"stage {stage} has {has}; {needs}; {shorter}free memory on its host or give it more",
        )
    return min(num_blocks, needed * scheduling.max_num_seqs)


def stage_addresses(hellos: Sequence[wire.Hello], grid: RankGrid) -> tuple[str, ...]:
    """Find the address by which others reach each rank. grid: the world's. Raise ConfigError.

    A stage that found the head by loopback is on the head's host, so others reach it where they found the head.
    """
    if len({hello.host.machine for hello in hellos}) == 1:
        return (local_address(),) * len(hellos)
    heads = [hello.host.head_address for hello in hellos if not is_loopback(hello.host.head_address)]
    addresses = []
    for hello in hellos:
        own = heads[0] if is_loopback(hello.host.address) and heads else hello.host.address
        if is_loopback(own):
            where = f"{grid.name(hello.rank)} on {hello.host.name} at {own}"
            raise ConfigError("--interface", f"other hosts cannot reach {where}")
        addresses.append(own)
    return tuple(addresses)


def scheduler_config(config: ServeConfig, hellos: Sequence[wire.Hello], num_stages: int) -> SchedulerConfig:
    """Make the scheduler's configuration for these ranks of one replica. Raise ConfigError."""
    arch = hellos[0].model.architecture
    check_microbatches(config, num_stages)
    on_cpus = any(hello.device.gpu is None for hello in hellos)
    return SchedulerConfig(
        num_stages=num_stages,
        microbatches=config.pipeline.microbatches,
        max_num_seqs=config.scheduling.max_num_seqs,
        max_queue=config.scheduling.max_queue,
        max_model_len=arch.context(config.model.max_model_len),
        block_size=config.cache.block_size,
        prefix_cache=config.cache.prefix_cache != "off",
        per_caller=config.cache.prefix_cache == "per-key",
        prefill_chunk=config.scheduling.prefill_chunk,
        max_auto_chunk=CPU_CHUNK if on_cpus else MAX_PROMPT_TOKENS_PER_STEP,
        eos_ids=arch.eos_ids,
        speculate=config.scheduling.speculate,
        runs_ahead=len(hellos) == 1,
    )


def check_microbatches(config: ServeConfig, num_stages: int) -> None:
    """Raise ConfigError if --microbatches is more than `num_stages` can use."""
    asked = config.pipeline.microbatches
    if asked is not None and asked > num_stages + 1:
        raise ConfigError("--microbatches", f"{asked} is more than {num_stages} stages + 1 can use")


def _transport(asked: str, hellos: Sequence[wire.Hello]) -> str:
    """Choose the transport for these ranks. Raise ConfigError where the one that was asked for lacks something."""
    if len(hellos) == 1 or asked == "local":
        return "local"
    if asked == "auto":
        return next(name for name in _FASTEST_FIRST if _what_it_lacks(name, hellos) is None)
    if lack := _what_it_lacks(asked, hellos):
        raise ConfigError("--transport", f"{asked} needs {lack}")
    return asked


_FASTEST_FIRST = ("nccl", "shm", "gloo")
"""The transports that `auto` chooses from: shm is fast, and notices a dead neighbour at once."""


def _what_it_lacks(transport: str, hellos: Sequence[wire.Hello]) -> str | None:
    """Return what a transport needs that these ranks do not have; None if they can use it."""
    match transport:
        case "nccl":
            own_gpus = all(hello.device.gpu is not None and not hello.device.shares_gpu for hello in hellos)
            return None if own_gpus else "a GPU of its own for every stage"
        case "shm":
            places = {(hello.host.machine, hello.host.user) for hello in hellos}
            if len(places) > 1:
                return "all stages on one host, started by one user"
            return None if sys.platform == "linux" else "Linux's memfd_create"
    return None


def difference(ours: wire.Hello, theirs: wire.Hello) -> tuple[str, str] | None:
    """Find the first difference that changes tokens. Return its flag, and what the other rank has."""
    if ours.model.architecture != theirs.model.architecture:
        return "--model", f"another model in {theirs.model.checkpoint}"
    if ours.model.weights != theirs.model.weights:
        return "--model", f"other weights in {theirs.model.checkpoint}"
    for name in ("dtype", "quantization", "kv_dtype"):
        own, other = getattr(ours.model, name), getattr(theirs.model, name)
        if own != other:
            return f"--{name.replace('_', '-')}", f"{name.replace('_', '-')} {other} instead of {own}"
    return None


def what_changed(before: wire.Hello, now: wire.Hello) -> str | None:
    """Say what a stage that came back has now and had not when the shape was decided; None if nothing."""
    if found := difference(before, now):
        return found[1]
    if (now.device.gpu is None) != (before.device.gpu is None):
        return "a CPU instead of a GPU" if now.device.gpu is None else "a GPU instead of a CPU"
    if now.host.name != before.host.name:
        return f"another machine, {now.host.name} instead of {before.host.name}"
    return None
