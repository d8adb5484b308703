"""The text that the terminal shows when the server is ready: one table, the addresses and commands to try."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from ppserve.config import ServerSettings
from ppserve.core.figures import counted, size_text, table
from ppserve.head.descriptions import ModelDescription, Topology
from ppserve.head.listener import Ports, address_text


def banner(description: ModelDescription, topology: Topology, settings: ServerSettings, ports: Ports) -> str:
    """Return the text for a server that has opened its ports."""
    num_stages = 1 + topology.stages[-1].stage
    num_replicas = 1 + topology.stages[-1].replica
    num_tensor = len(topology.stages[0].ranks)
    ranks = f" of {num_tensor} tensor ranks each" if num_tensor > 1 else ""
    replicas = f" in each of {num_replicas} replicas," if num_replicas > 1 else ""
    lines = [
        "",
        f"ppserve {description.version}: {description.name}, {description.num_parameters / 1e6:.4g} M parameters,"
        f" {description.numbers}, context {description.max_context}",
        *_stage_table(topology, num_stages, num_replicas),
        f"  {description.architecture.num_layers} layers over {counted(num_stages, 'stage')}{ranks},{replicas}"
        f" {topology.transport} transport, {counted(topology.microbatches, 'microbatch', 'es')} in flight",
    ]
    if not description.deterministic:
        lines.append(f"  not deterministic here: {description.nondeterministic_reason}")
    grpc, http, metrics = (address_text(settings.host, port) for port in (ports.grpc, ports.http, ports.metrics))
    scheme = "http" if settings.tls_cert is None else "https"
    lines += [f"  gRPC     {grpc}", f"  HTTP     {scheme}://{http}/v1"]
    if not settings.no_page:
        lines.append(f"  page     {scheme}://{http}/")
    lines += [f"  metrics  http://{metrics}/metrics", "", "Try:"]
    if description.has_tokenizer:
        lines.append(f'  {_command()} generate --target {grpc} "Once upon a time"')
        if description.chat_format.template is not None:
            lines.append(f"  {_command()} chat --url {scheme}://{http}")
    else:
        lines.append(f"  {_command()} health --target {grpc}    (no tokenizer: send token ids)")
    if description.path == "tiny":
        lines += ["", "tiny only tells small stories. A model that answers, 98 MB:"]
        lines.append(f"  {_command()} fetch smollm2 && {_command()} serve --model smollm2")
    return "\n".join([*lines, ""])


def _command() -> str:
    """Return how this program is called from a shell here: by its name where that is on PATH, else by its file's
    path."""
    own = Path(sys.executable).with_name("ppserve")
    if (found := shutil.which("ppserve")) is not None and os.path.samefile(found, own):
        return "ppserve"
    if not own.exists():
        return f"{sys.executable} -m ppserve"
    return os.path.relpath(own) if own.is_relative_to(Path.cwd()) else str(own)


def _stage_table(topology: Topology, num_stages: int, num_replicas: int) -> Iterator[str]:
    rows = [("stage", "layers", "device", "params", "weights", "KV")]
    for stage in topology.stages:
        parts = [stage.layers]
        if stage.stage == 0:
            parts.insert(0, "wte")
        if stage.stage == num_stages - 1:
            parts.append("head")
        sizes = (f"{stage.num_parameters / 1e6:.4g} M", size_text(stage.weight_bytes), size_text(stage.kv_bytes))
        name = f"{stage.replica}.{stage.stage}" if num_replicas > 1 else str(stage.stage)
        hosts = ", ".join(dict.fromkeys(rank.host for rank in stage.ranks))
        rows.append((name, "+".join(parts), f"{stage.device} on {hosts}", *sizes))
    return (f"  {line}" for line in table(*rows, left=3))
