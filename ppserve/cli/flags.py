"""The flags of `ppserve serve` under the headings of its help, and its `--config` file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import click

from ppserve import config as cfg
from ppserve.cli.types import (
    COUNT,
    DRAFT_TOKENS,
    FILE,
    IP,
    LAYERS,
    NAMES,
    ORIGINS,
    PORTS,
    SIZE,
    SWITCH,
    TEXT,
    HelpfulCommand,
    Number,
    Whole,
    auto_or,
)
from ppserve.errors import did_you_mean
from ppserve.head.api.answer_parts.formats import REASONING_FORMAT_NAMES, TOOL_FORMAT_NAMES
from ppserve.head.limits import MAX_COUNT

_MOST_THREADS = 1024


class _PortOption(click.Option):
    """A port's flag that ignores PPSERVE_PORT=tcp://ADDRESS:PORT, which Kubernetes sets."""

    def value_from_envvar(self, ctx: click.Context) -> Any:
        value = super().value_from_envvar(ctx)
        return None if isinstance(value, str) and value.startswith("tcp://") else value


def _flag(name: str, help: str, type: Any = None, **parsed: Any) -> click.Option:
    return click.Option([name], help=help, type=type, **parsed)


def _list(name: str, help: str, type: Any) -> click.Option:
    """Return a flag that may be repeated; each value is a list as well."""
    return _flag(name, help, type, multiple=True, callback=lambda _ctx, _param, lists: sum(lists, ()))


def _choice(name: str, choices: tuple[str, ...], default: str, help: str) -> click.Option:
    return _flag(name, help, click.Choice(choices), default=default)


def _port(name: str, help: str, **parsed: Any) -> click.Option:
    return _PortOption([name], help=help, **{"type": Whole(0, 65535), **parsed})


def _load_config_file(ctx: click.Context, _param: click.Parameter, path: Path | None) -> None:
    """Make the file's entries defaults: flags and environment variables override them."""
    if path is None:
        return
    try:
        entries = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{path} cannot be read as TOML: {error}") from None
    known = {param.name: param for param in ctx.command.params if param.name != "config"}
    defaults: dict[str, str | list[str]] = {}
    for key, value in entries.items():
        name = key.replace("-", "_")
        if name not in known:
            near = did_you_mean(name, known).replace("_", "-")
            raise click.BadParameter(f"{path}: unknown entry {key!r}{near}")
        is_list = known[name].multiple
        parts = value if is_list and isinstance(value, list) else [value]
        texts = [_as_text(f"{path}: {key}", part) for part in parts]
        defaults[name] = texts if is_list else texts[0]
    ctx.obj = path  # for messages
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _as_text(origin: str, value: object) -> str:
    """Return an entry as the text that its flag would get, so that the flag checks it."""
    parts = value if isinstance(value, list) else [value]
    if not isinstance(value, str) and not all(isinstance(part, int | float) for part in parts):
        raise click.BadParameter(f"{origin}: is not a text, a number, a list of numbers, true or false")
    return ",".join(map(str, parts))


_CONFIG = click.Option(
    ["--config"], type=FILE, is_eager=True, expose_value=False, callback=_load_config_file,
    help="TOML file with these flags as entries.",
)  # fmt: skip

FLAGS: dict[str, tuple[click.Option, ...]] = {
    "Model": (
        _CONFIG,
        _flag(
            "--model", "Model to serve: `tiny`, `smollm2`, a directory, a .gguf, .bin or .pt file, or a hub id.",
            default="tiny",
        ),
        _list(
            "--served-model-name",
            "Names that callers may use for the model, as a,b. Default: the hub id or file name.",
            NAMES,
        ),
        _choice("--dtype", cfg.DTYPES, "auto", "Type of weights and hidden states."),
        _choice(
            "--quantization", cfg.QUANTIZATIONS, "auto",
            "Type of the linear layers' weights; the LM head then is int8. CPUs only. auto: int4 for a GGUF"
            " in Q4_0 or Q4_1 (with --dtype auto), as the file has it; none for others.",
        ),
        _flag("--chat-template", "Jinja template for chats. Default: the model's own.", FILE),
        _choice(
            "--tool-format", TOOL_FORMAT_NAMES, "auto",
            "How the model writes calls of tools. auto: as the chat template shows.",
        ),
        _choice(
            "--reasoning-format", REASONING_FORMAT_NAMES, "auto",
            "How the model writes its reasoning. auto: as the chat template shows; none: answers keep it as text.",
        ),
    ),
    "Pipeline": (
        _flag("--stages", "Pipeline stages; from a plain shell, torchrun is started for them.", COUNT),
        _flag("--tensor-parallel", "Tensor ranks, which share the layers of a stage.", COUNT, default=1),
        _flag("--replicas", "Pipelines behind one head, each with all layers.", COUNT, default=1),
        _flag(
            "--layers", "Layers of each stage, as 9,3 or 7.5,4.5; auto balances them.",
            auto_or(LAYERS), default="auto",
        ),
        _flag(
            "--microbatches",
            "Most steps in flight; auto allows as many as there are stages, or one more.",
            auto_or(COUNT), default="auto",
        ),
        _choice(
            "--transport", cfg.TRANSPORTS, "auto",
            "How hidden states travel between stages.",
        ),
        _flag(
            "--threads",
            "Computing threads of each stage. Default: the host's cores divided among its stages.",
            Whole(1, _MOST_THREADS),
        ),
        _flag("--force-cpu", "Do not use GPUs.", is_flag=True),
        _flag(
            "--batch-invariant", "Make tokens on GPUs, too, independent of what else is computed; slower.",
            is_flag=True,
        ),
        _flag(
            "--cuda-graphs", "Record decoding steps as CUDA graphs when serving begins.",
            SWITCH, default="on",
        ),
        _flag("--prefill-chunk", "Most prompt tokens in one step.", auto_or(COUNT), default="auto"),
        _flag(
            "--speculate", "Draft tokens per sequence and step; auto drafts where it raises the speed.",
            auto_or(DRAFT_TOKENS), default="auto",
        ),
    ),
    "Memory": (
        _flag(
            "--kv-cache-memory",
            "KV cache of each stage, for example 2G, allocated at start. Default: on CPUs a quarter of the free"
            " memory, at most 2 GiB, and for one full sequence up to 7/8 of it, allocated as needed; on GPUs 85%"
            " of what is free.",
            SIZE,
        ),
        _choice(
            "--kv-dtype", cfg.KV_DTYPES, "auto",
            "Type of the KV cache. auto: the same as --dtype; for quantized models the checkpoint's own.",
        ),
        _flag("--block-size", "Tokens per KV block.", Whole(1, 256), default=16),
        _choice(
            "--prefix-cache", ("shared", "per-key", "off"), "per-key",
            "Share cached prompt prefixes: between all requests, between those of one API key, or never.",
        ),
        _flag("--max-model-len", "Longest prompt and answer together. Default: the model's.", COUNT),
        _flag("--max-num-seqs", "Most sequences that run at once.", COUNT, default=256),
        _flag("--max-queue", "Most requests that wait; further ones are refused.", COUNT, default=1024),
    ),
    "gRPC and HTTP": (
        _flag("--host", "Address to listen on.", IP, default="127.0.0.1"),
        _port("--port", "Port of gRPC; 0 picks a free one.", default=50051),
        _port("--http-port", "Port of HTTP with OpenAI's paths and the page; 0 picks a free one.", default=8000),
        _list("--cors-origin", "Origins whose web pages may read HTTP answers; * allows all.", ORIGINS),
        _flag("--no-page", "Do not show the page on the HTTP port.", is_flag=True),
        _flag(
            "--max-logprobs",
            "Most likely tokens that a request may ask for with each of its tokens; -1: all of the vocabulary.",
            Whole(-1, MAX_COUNT), default=20,
        ),
        _flag("--vllm-grpc", "Serve vllm.grpc.engine as well, on the gRPC port, for routers.", is_flag=True),
        _port("--metrics-port", "Port of /metrics and the page without a prompt; 0 picks one.", default=9400),
        _flag("--api-key-file", "File of accepted API keys, one a line; SIGHUP reads it again.", FILE),
        _flag("--tls-cert", "Certificate for gRPC and HTTP; needs --tls-key.", FILE),
        _flag("--tls-key", "Key of --tls-cert.", FILE),
        _flag("--tls-client-ca", "Demand client certificates of this authority.", FILE),
        _flag(
            "--shutdown-timeout", "Seconds that running streams have to finish at shutdown.",
            Number(0, 86400), default=25,
        ),
    ),
    "Several hosts": (
        _flag("--secret-file", "File with the secret of head and stages, equal on every host.", FILE),
        _flag(
            "--stage-tls-cert",
            "This host's certificate for TLS between head and stages; needs --stage-tls-key and --stage-tls-ca.",
            FILE,
        ),
        _flag("--stage-tls-key", "Key of --stage-tls-cert.", FILE),
        _flag("--stage-tls-ca", "Authority that signs for the ranks of this server alone.", FILE),
        _flag(
            "--interface",
            "Network interface for connections between stages. Default: the one towards the head.",
            TEXT,
        ),
        _flag("--advertise", "Address that other stages connect to. Default: the interface's.", IP),
        _port(
            "--control-port",
            "Port of the head that stages connect to. Default: MASTER_PORT + 1.",
            type=Whole(1, 65535),
        ),
        _flag("--stage-ports", "Ports that stages listen on for each other, as 29600-29699. Default: any.", PORTS),
        _flag(
            "--start-timeout",
            "Give up when no stage has made progress with loading for this many seconds.",
            Number(1), default=1800,
        ),
    ),
    "Logs": (
        _choice("--log-level", ("debug", "info", "warning", "error"), "info", "The lowest level that is logged."),
        _choice("--log-format", ("text", "json"), "text", "Format of the log. json writes one object a line."),
        _flag(
            "--trace",
            "Write a Chrome trace to this file, for Perfetto.",
            click.Path(dir_okay=False, path_type=Path),
        ),
    ),
}  # fmt: skip


_REMOVED = {
    "--parallel": "--stages, --tensor-parallel and --replicas say the shape; `ppserve plan` says what fits",
    "--expect": "--layers auto balances for prompts and answers of 128 tokens, 16 requests at once;"
    " --layers 9,3 sets a split",
    "--world": "`ppserve plan` shows one shape, which --stages, --tensor-parallel and --replicas say",
    "--costs": "`ppserve plan` predicts no speeds; `ppserve bench` measures them",
}
"""Flags of earlier versions, and what to use instead."""


def removed(*names: str) -> list[click.Option]:
    """Return options that are in no help, and that are refused wherever they are given: as a flag, in the
    environment or in a file."""
    return [
        click.Option([name], type=TEXT, hidden=True, expose_value=False, callback=_refuse_removed)
        for name in names
    ]


def _refuse_removed(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.BadParameter(f"it was removed: {_REMOVED[param.opts[0]]}", ctx, param)


_EPILOG = (
    "Every flag has an environment variable, such as PPSERVE_HTTP_PORT for --http-port, and an entry of the same"
    " name in the --config file; a flag overrides its variable, and that the file."
)


class ServeCommand(HelpfulCommand):
    """A command whose help shows FLAGS under their headings."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Example"):
            formatter.write_text("ppserve serve --model smollm2 --stages 2 --http-port 8080")
        formatter.write_paragraph()
        formatter.write_text(_EPILOG)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, flags in FLAGS.items():
            with formatter.section(heading):
                formatter.write_dl([row for flag in flags if (row := flag.get_help_record(ctx)) is not None])
