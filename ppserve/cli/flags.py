"""The flags of `ppserve serve`, under its help's headings, and its `--config` file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import click

from ppserve import config as cfg
from ppserve.cli.types import COUNT, DRAFT_TOKENS, EXPECTED, FILE, IP_ADDRESS, LAYERS, PORTS, SIZE, Number, auto_or


class _PortOption(click.Option):
    """Ignores PPSERVE_PORT=tcp://ADDRESS:PORT, which Kubernetes sets."""

    def value_from_envvar(self, ctx: click.Context) -> Any:
        value = super().value_from_envvar(ctx)
        return None if isinstance(value, str) and value.startswith("tcp://") else value


def _flag(name: str, help: str, **parsed: Any) -> click.Option:
    return click.Option([name], help=help, **parsed)


def _choice(name: str, choices: tuple[str, ...], default: str, help: str) -> click.Option:
    return _flag(name, help, type=click.Choice(choices), default=default)


def _port(name: str, help: str, **parsed: Any) -> click.Option:
    return _PortOption([name], help=help, **{"type": click.IntRange(0, 65535), **parsed})


def _load_config_file(ctx: click.Context, _param: click.Parameter, path: Path | None) -> None:
    """The file's entries become defaults, below flags and the environment."""
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
    ctx.obj = path  # for messages
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _as_text(origin: str, value: object) -> str:
    """An entry as text, so that the flag of its name checks it."""
    parts = value if isinstance(value, list) else [value]
    if not isinstance(value, str) and not all(isinstance(part, int | float) for part in parts):
        raise click.BadParameter(f"{origin}: not a text, a number, a list of numbers, true or false")
    return ",".join(map(str, parts))


_CONFIG = click.Option(
    ["--config"], type=FILE, is_eager=True, expose_value=False, callback=_load_config_file,
    help="TOML file with any of these flags as entries.",
)  # fmt: skip

FLAGS: dict[str, tuple[click.Option, ...]] = {
    "Model": (
        _CONFIG,
        _flag("--model", "`tiny`, `smollm2`, a directory, a .gguf, .bin or .pt file, a hub id.", default="tiny"),
        _choice("--dtype", cfg.DTYPES, "auto", "Of weights and hidden states."),
        _choice("--quantization", cfg.QUANTIZATIONS, "none", "Of linear layers; the LM head: int8. CPUs only."),
        _flag("--chat-template", "Jinja template for chats; unset = the model's own.", type=FILE),
    ),
    "Pipeline": (
        _flag("--stages", "From a plain shell: start this many stages under torchrun.", type=COUNT),
        _flag("--tensor-parallel", "Ranks that share each stage's layers.", type=COUNT, default=1),
        _flag("--replicas", "Pipelines with all layers each, behind one head.", type=COUNT, default=1),
        _choice("--parallel", ("off", "auto"), "off", "auto: measure the ranks and choose the shape."),
        _flag("--layers", "Layers per stage, as 9,3 or 7.5,4.5.", type=auto_or(LAYERS), default="auto"),
        _flag("--microbatches", "In flight; auto = stages, or one more.", type=auto_or(COUNT), default="auto"),
        _choice("--transport", ("auto", "nccl", "gloo", "shm", "local"), "auto", "How hidden states travel."),
        _flag("--threads", "Computing threads per stage; unset = this host's cores, shared.", type=COUNT),
        _flag("--force-cpu", "Do not use GPUs.", is_flag=True),
        _flag("--batch-invariant", "GPUs: tokens do not depend on what else is computed.", is_flag=True),
        _flag(
            "--cuda-graphs", "Record decoding steps when serving begins.",
            type=bool, default="on", metavar="on|off",
        ),
        _flag("--prefill-chunk", "Most prompt tokens in one step.", type=auto_or(COUNT), default="auto"),
        _flag(
            "--speculate", "Draft tokens per step; auto = where they pay.",
            type=auto_or(DRAFT_TOKENS), default="auto",
        ),
        _flag(
            "--expect", "Typical prompt tokens, new tokens, requests at once; for --layers and --parallel auto.",
            type=EXPECTED, default="128,128,16",
        ),
    ),
    "Memory": (
        _flag(
            "--kv-cache-memory", "Per stage, such as 2G, taken from the start; unset = from free memory, as used.",
            type=SIZE,
        ),
        _choice(
            "--kv-dtype", cfg.KV_DTYPES, "auto",
            "Of keys and values; auto = --dtype; beside int8 as in the checkpoint.",
        ),
        _flag("--block-size", "Tokens per KV block.", type=click.IntRange(1, 256), default=16),
        _choice("--prefix-cache", ("shared", "per-key", "off"), "per-key", "Whose requests share equal prefixes."),
        _flag("--max-model-len", "Longest prompt + answer; unset = what the model allows.", type=COUNT),
        _flag("--max-num-seqs", "Sequences running at once.", type=COUNT, default=256),
        _flag("--max-queue", "Requests waiting before new ones are refused.", type=COUNT, default=1024),
    ),
    "Front doors": (
        _flag("--host", "Address to listen on.", type=IP_ADDRESS, default="127.0.0.1"),
        _port("--port", "gRPC; 0 picks a free one.", default=50051),
        _port("--http-port", "HTTP with OpenAI's paths; 0 picks a free one.", default=8000),
        _flag("--vllm-grpc", "Serve vllm.grpc.engine too, on the gRPC port, for routers.", is_flag=True),
        _port("--metrics-port", "HTTP /metrics; 0 picks a free one.", default=9400),
        _flag("--api-key-file", "One key a line; reloaded on SIGHUP.", type=FILE),
        _flag("--tls-cert", "Certificate for gRPC and HTTP; with the next.", type=FILE),
        _flag("--tls-key", "Its key.", type=FILE),
        _flag("--tls-client-ca", "Demand client certificates of this authority.", type=FILE),
        _flag(
            "--shutdown-timeout", "Seconds that running streams have to finish.", type=Number(0, 86400), default=25
        ),
    ),
    "Several hosts": (
        _flag("--secret-file", "What head and stages prove to know; the same on every host.", type=FILE),
        _flag("--stage-tls-cert", "This host's certificate for the head; with the next two.", type=FILE),
        _flag("--stage-tls-key", "Its key.", type=FILE),
        _flag("--stage-tls-ca", "Authority that signs for the ranks of this server alone.", type=FILE),
        _flag("--interface", "This host's, for other stages; unset = the one that leads to the head."),
        _flag("--advertise", "For other stages; unset = found as --interface is.", type=IP_ADDRESS),
        _port("--control-port", "Of the head, for stages.", type=click.IntRange(1, 65535)),
        _flag("--stage-ports", "Where stages listen for each other: 29600-29699; unset = any.", type=PORTS),
        _flag("--start-timeout", "Seconds without progress at start.", type=Number(1), default=1800),
    ),
    "Logs": (
        _choice("--log-level", ("debug", "info", "warning", "error"), "info", "The least that is logged."),
        _choice("--log-format", ("text", "json"), "text", "json: one object a line."),
        _flag("--trace", "Chrome trace for Perfetto.", type=click.Path(dir_okay=False, path_type=Path)),
    ),
}  # fmt: skip


class ServeCommand(click.Command):
    """A command whose help shows FLAGS under their headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, flags in FLAGS.items():
            with formatter.section(heading):
                formatter.write_dl([row for flag in flags if (row := flag.get_help_record(ctx)) is not None])
