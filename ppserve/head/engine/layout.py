"""Who loads what, and how stages talk: decided once, when every stage has said what it found."""

from __future__ import annotations

import logging
import os
import sys

from ppserve import wire
from ppserve.config import ServeConfig
from ppserve.core.architecture import Architecture, Split, stage_layouts
from ppserve.core.partition import (
    balance,
    check_split,
    mean,
    split_by_cost,
    split_by_weight,
)
from ppserve.core.scheduling.config import MAX_PROMPT_TOKENS_PER_STEP, SchedulerConfig
from ppserve.errors import ConfigError
from ppserve.head.engine.members import Decision

log = logging.getLogger("ppserve.head")

# On a CPU more rows than these make a token no cheaper, and equal chunks keep the stages in step
# (docs/performance/beside-others.md, "Equal chunks beat shrinking ones").
CPU_CHUNK = 128


def decide(config: ServeConfig, hellos: tuple[wire.Hello, ...]) -> Decision:
    """Layouts, dtype and transport for these stages. Raises ConfigError."""
    first = hellos[0]
    for hello in hellos[1:]:
        if hello.architecture != first.architecture:
            raise ConfigError("--model", f"stage {hello.stage} on {hello.host} found another model than stage 0")
        if hello.dtype != first.dtype:
            raise ConfigError("--dtype", f"stage {hello.stage} would use {hello.dtype}, stage 0 {first.dtype}")
    arch, num_stages = first.architecture, len(hellos)
    split = config.pipeline.layers or choose_split(config, arch, hellos)
    check_split(split, arch, num_stages)
    scheduling = scheduler_config(config, arch, hellos)
    one_host = len({hello.machine for hello in hellos}) == 1
    return Decision(
        layouts=stage_layouts(split),
        dtype=first.dtype,
        transport=_transport(config.pipeline.transport, hellos, one_host),
        store_host="127.0.0.1" if one_host else os.environ.get("MASTER_ADDR", first.host),
        max_rows=scheduling.max_step_tokens,
    )


def choose_split(config: ServeConfig, arch: Architecture, hellos: tuple[wire.Hello, ...]) -> Split:
    """The split for the expected mix of prompts and answers, by what the stages measured, else by weight."""
    measured = tuple(hello.costs for hello in hellos if hello.costs is not None)
    if len(measured) < len(hellos):
        return split_by_weight(arch, len(hellos))
    parts = mean(measured)
    split = split_by_cost(parts, arch.num_layers, len(hellos))
    log.info(
        "--layers auto: %s, predicted balance %.0f%% for prompts of %d tokens and answers of %d",
        split,
        100 * balance(parts.costs(split)),
        config.scheduling.expect_prompt,
        config.scheduling.expect_new,
    )
    return split


def scheduler_config(config: ServeConfig, arch: Architecture, hellos: tuple[wire.Hello, ...]) -> SchedulerConfig:
    """What the scheduler may do with this model. Raises ConfigError."""
    check_microbatches(config, len(hellos))
    return SchedulerConfig(
        num_stages=len(hellos),
        microbatches=config.pipeline.microbatches,
        max_num_seqs=config.scheduling.max_num_seqs,
        max_queue=config.scheduling.max_queue,
        max_model_len=max_context(config, arch),
        block_size=config.cache.block_size,
        prefill_chunk=config.scheduling.prefill_chunk,
        max_auto_chunk=CPU_CHUNK if any(hello.gpu is None for hello in hellos) else MAX_PROMPT_TOKENS_PER_STEP,
        eos_id=arch.eos_id,
    )


def check_microbatches(config: ServeConfig, num_stages: int) -> None:
    """Raises ConfigError for more steps in flight than `num_stages` stages can use."""
    asked = config.pipeline.microbatches
    if asked is not None and asked > num_stages + 1:
        raise ConfigError("--microbatches", f"{asked} is more than {num_stages} stages + 1 can use")


def max_context(config: ServeConfig, arch: Architecture) -> int:
    """Tokens of prompt and answer together. Raises ConfigError where more is asked for than the model has."""
    asked = config.model.max_model_len
    if asked is not None and asked > arch.max_positions:
        raise ConfigError("--max-model-len", f"{asked} is beyond the model's {arch.max_positions} positions")
    return asked or arch.max_positions


def num_blocks(config: ServeConfig, arch: Architecture, loaded: tuple[wire.Loaded, ...]) -> int:
    """KV blocks of every stage: what the tightest stage can hold, but no more than could ever be used.

    Raises ConfigError where not even one full-length sequence fits.
    """
    block_size, context = config.cache.block_size, max_context(config, arch)
    needed = -(-context // block_size)
    can_hold = min(stage.kv_bytes // stage.block_bytes for stage in loaded)
    if can_hold < needed:
        tightest = min(range(len(loaded)), key=lambda i: loaded[i].kv_bytes // loaded[i].block_bytes)
        raise ConfigError(
            "--kv-cache-memory",
            f"stage {tightest} has room for {can_hold * block_size} tokens; one sequence may take {context}"
            f" ({needed * loaded[tightest].block_bytes} bytes); lower --max-model-len or give it more",
        )
    return min(can_hold, needed * config.scheduling.max_num_seqs)


def _transport(asked: str, hellos: tuple[wire.Hello, ...], one_host: bool) -> str:
    if len(hellos) == 1:
        return "local"
    own_gpus = all(hello.gpu is not None and not hello.shares_gpu for hello in hellos)
    if asked == "auto":
        # Shared memory rests on Linux's memfd; it beats sockets by far and notices a dead neighbour as soon.
        return "nccl" if own_gpus else "shm" if one_host and sys.platform == "linux" else "gloo"
    if asked == "nccl" and not own_gpus:
        raise ConfigError("--transport", "nccl needs a GPU of its own for every stage")
    if asked == "shm" and not one_host:
        raise ConfigError("--transport", "shm needs all stages on one host")
    if asked == "local":
        raise ConfigError("--transport", "local connects stages within one process; these are several")
    return asked
