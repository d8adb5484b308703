"""`ppserve serve`: turns flags into a frozen config, and runs this rank's part of the pipeline."""

from __future__ import annotations

import ipaddress
import math
import os
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import click

from ppserve import config as cfg
from ppserve.cli.types import GUESSES, LAYERS, ON_OFF, PORTS, SIZE, AutoOr, Number, PortOption
from ppserve.errors import ConfigError
from ppserve.process.environment import RankEnvironment, ignore_what_is_for_the_head, open_many_files
from ppserve.process.rank import run_rank
from ppserve.process.stage_process import ForkServer

_FILE = click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)
# Numbers beyond this are nobody's, and stages are told no more than 64 bits.
_COUNT = click.IntRange(1, 10**9)
# So that a slip of the finger does not fill the host with processes.
_RANKS_PER_CORE = 64
_port = partial(click.option, cls=PortOption, type=click.IntRange(0, 65535))


def _load_config_file(ctx: click.Context, _param: click.Parameter, path: Path | None) -> None:
    """Entries of the `--config` file become defaults, which flags and environment variables override."""
    if path is None:
        return
    try:
        entries = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{path}: {error}") from None
    known = {param.name for param in ctx.command.params if param.name != "config"}
    defaults: dict[str, str] = {}
    for key, value in entries.items():
        name = key.replace("-", "_")
        if name not in known:
            raise click.BadParameter(f"{path}: unknown entry {key!r}")
        defaults[name] = _as_text(f"{path}: {key}", value)
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _as_text(origin: str, value: object) -> str:
    """An entry as the flag of its name would be given, for that is what is checked."""
    parts = value if isinstance(value, list) else [value]
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str) and not all(type(part) in (int, float) for part in parts):
        raise click.BadParameter(f"{origin}: not a text, a number, a list of numbers, true or false")
    return ",".join(map(str, parts))


@click.command(context_settings={"show_default": True, "auto_envvar_prefix": "PPSERVE"})
@click.option(
    "--config", type=_FILE, is_eager=True, expose_value=False, callback=_load_config_file,
    help="TOML file with any of these flags as entries.",
)  # fmt: skip
@click.option("--stages", type=_COUNT, help="From a plain shell: start this many stages under torchrun.")
@click.option("--tensor-parallel", type=_COUNT, default=1, help="Ranks that share each stage's layers.")
@click.option("--replicas", type=_COUNT, default=1, help="Pipelines with all layers each, behind one head.")
@click.option(
    "--parallel", type=click.Choice(cfg.PARALLEL), default="as told",
    help="auto: measure, predict every shape that so many ranks can take, and take the best.",
)  # fmt: skip
@click.option("--model", default="tiny", help="`tiny`, a directory, a .bin or .pt file, or a hub id.")
@click.option("--dtype", type=click.Choice(cfg.DTYPES), default="auto")
@click.option(
    "--quantization", type=click.Choice(cfg.QUANTIZATIONS), default="none",
    help="int8: weights of linear layers and LM head, while loading. CPUs only.",
)  # fmt: skip
@click.option(
    "--kv-dtype", type=click.Choice(cfg.KV_DTYPES), default="auto", help="Of keys and values; auto = --dtype."
)
@click.option("--layers", type=AutoOr(LAYERS), default="auto", help="Layers per stage, as 9,3 or 7.5,4.5.")
@click.option("--microbatches", type=AutoOr(_COUNT), default="auto", help="In flight; auto = stages, or one more.")
@click.option("--transport", type=click.Choice(cfg.TRANSPORTS), default="auto")
@click.option("--threads", type=_COUNT, help="Computing threads per stage; unset = this host's cores, shared.")
@click.option("--force-cpu", is_flag=True, help="Leave GPUs alone.")
@click.option("--batch-invariant", is_flag=True, help="GPUs: tokens that do not depend on what else is computed.")
@click.option("--cuda-graphs", type=ON_OFF, default="on", help="Record decoding steps when serving begins.")
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@_port("--port", default=50051, help="gRPC; 0 picks a free one.")
@_port("--http-port", default=8000, help="HTTP with OpenAI's paths; 0 picks a free one.")
@click.option("--chat-template", type=_FILE, help="Jinja template that makes one prompt of a chat's messages.")
@click.option("--vllm-grpc", is_flag=True, help="Serve vllm.grpc.engine too, on the gRPC port, for routers.")
@_port("--metrics-port", default=9400, help="HTTP /metrics; 0 picks a free one.")
@click.option("--max-num-seqs", type=_COUNT, default=256, help="Sequences running at once.")
@click.option("--max-model-len", type=_COUNT, help="Longest prompt + answer; unset = what the model allows.")
@click.option("--max-queue", type=_COUNT, default=1024, help="Requests waiting before new ones are refused.")
@click.option("--block-size", type=click.IntRange(1, 256), default=16, help="Tokens per KV block.")
@click.option(
    "--kv-cache-memory", type=SIZE, help="Per stage, such as 2G, taken at once; unset = from free memory, as used."
)
@click.option(
    "--prefix-cache", type=click.Choice(cfg.PREFIX_CACHES), default="per-key", help="Who shares equal prefixes."
)
@click.option("--prefill-chunk", type=AutoOr(_COUNT), default="auto", help="Most prompt tokens in one step.")
@click.option(
    "--speculate", type=AutoOr(GUESSES), default="off", help="auto (where they pay), off, or draft tokens a step."
)
@click.option(
    "--expect-prompt", type=_COUNT, default=128, help="Typical prompt tokens, for --layers and --parallel auto."
)
@click.option(
    "--expect-new", type=_COUNT, default=128, help="Typical new tokens, for --layers and --parallel auto."
)
@click.option("--expect-callers", type=_COUNT, default=16, help="Typical requests at once, for --parallel auto.")
@click.option("--shutdown-timeout", type=Number(0, 86400), default=25, help="Seconds that streams have.")
@click.option("--start-timeout", type=Number(1), default=1800, help="Seconds without progress at start.")
@click.option("--tls-cert", type=_FILE)
@click.option("--tls-key", type=_FILE)
@click.option("--tls-client-ca", type=_FILE, help="Demand client certificates of this authority.")
@click.option("--secret-file", type=_FILE, help="What stages on several hosts prove to know; same on every host.")
@click.option("--stage-tls-cert", type=_FILE, help="Of this host's ranks on several hosts; with the next two.")
@click.option("--stage-tls-key", type=_FILE)
@click.option("--stage-tls-ca", type=_FILE, help="Authority that signs for the ranks of this server alone.")
@click.option("--interface", help="Of this host, for other stages; unset = the one that leads to the head.")
@click.option("--advertise", help="This host's address for other stages; unset = found as --interface is.")
@_port("--control-port", type=click.IntRange(1, 65535), help="Of the head on several hosts, for stages.")
@click.option("--stage-ports", type=PORTS, help="Where stages listen for each other: 29600-29699; unset = any.")
@click.option("--api-key-file", type=_FILE, help="One key a line; reloaded on SIGHUP.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text")
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="Chrome trace for Perfetto.")
def serve(stages: int | None, **flags: Any) -> None:
    """Serve a model: one pipeline stage per torchrun rank, gRPC and HTTP on rank 0.

    The ranks are tensor ranks x replicas x stages.
    """
    config = build_config(flags)
    environment = RankEnvironment.from_environ()
    sizes = {"--stages": stages or 1}
    sizes |= {f"--{name}": flags[name.replace("-", "_")] for name in ("tensor-parallel", "replicas")}
    asked = math.prod(sizes.values())
    if environment is None:
        from ppserve.cli.check import check
        from ppserve.process.torchrun import run_ranks

        room = _RANKS_PER_CORE * (os.cpu_count() or 1)
        if asked > room:
            problem = f"{asked} ranks; on this host at most {room} are started, {_RANKS_PER_CORE} for each core"
            raise ConfigError(max(sizes, key=sizes.__getitem__), problem)
        check(config, asked)
        sys.exit(run_ranks(asked, sys.argv[1:], config.server.shutdown_timeout_s))
    if stages is not None and asked != environment.world_size:
        problem = f"{stages} stages need {asked} ranks, but torchrun started {environment.world_size}"
        raise ConfigError("--stages", problem)
    ignore_what_is_for_the_head()
    open_many_files()
    if environment.rank > 0:
        sys.exit(run_rank(config, environment))
    from ppserve.cli.check import check

    check(config, environment.world_size)
    # It imports torch, and this process the head, at the same time.
    fork_server = ForkServer()
    fork_server.prepare()
    from ppserve.head.app import run_head

    sys.exit(run_head(config, environment, fork_server))


def build_config(flags: dict[str, Any]) -> cfg.ServeConfig:
    """The frozen config of all flags. Raises ConfigError for flags that do not go together."""
    if len({bool(flags[f"stage_tls_{part}"]) for part in ("cert", "key", "ca")}) > 1:
        raise ConfigError("--stage-tls-cert", "needs --stage-tls-key and --stage-tls-ca, and the other way round")
    for name in ("host", "advertise"):
        try:
            ipaddress.ip_address(flags[name] if flags[name] not in (None, "localhost") else "127.0.0.1")
        except ValueError:
            raise ConfigError(f"--{name}", f"{flags[name]!r} is not an IP address") from None
    fields = {"model": "path", "shutdown_timeout": "shutdown_timeout_s", "log_level": "level"}
    fields |= {"start_timeout": "start_timeout_s", "log_format": "format"}
    return cfg.ServeConfig.of({fields.get(name, name): value for name, value in flags.items()})
