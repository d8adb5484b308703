"""What the terminal shows at start-up: progress while weights load, then one table and a command to try."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

from ppserve.core.figures import count, counted, size, table
from ppserve.head.binding import Ports
from ppserve.head.descriptions import ModelDescription, Topology
from ppserve.head.engine.member import StageState
from ppserve.head.engine.members import Members

_REDRAW_S = 0.2
_BAR = 24


def banner(description: ModelDescription, topology: Topology, host: str, ports: Ports) -> str:
    """A table of the stages, the addresses, and a command to try."""
    arch = description.architecture
    lines = [
        "",
        f"ppserve {description.version}: {description.name}, {count(description.num_parameters)} parameters,"
        f" {description.numbers}, context {description.max_context}",
    ]
    rows = [("stage", "layers", "device", "params", "weights", "KV")]
    num_stages = 1 + max(stage.stage for stage in topology.stages)
    num_replicas = 1 + max(stage.replica for stage in topology.stages)
    num_tensor = len(topology.stages[0].ranks)
    for stage in topology.stages:
        parts = ["wte"] * (stage.stage == 0) + [stage.layers]
        parts += ["head"] * (stage.stage == num_stages - 1)
        sizes = (count(stage.num_parameters), size(stage.weight_bytes), size(stage.kv_bytes))
        name = f"{stage.replica}.{stage.stage}" if num_replicas > 1 else str(stage.stage)
        hosts = ", ".join(dict.fromkeys(rank.host for rank in stage.ranks))
        rows.append((name, "+".join(parts), f"{stage.device} on {hosts}", *sizes))
    lines += [f"  {line}" for line in table(*rows, left=3)]
    ranks = f" of {num_tensor} tensor ranks each" * (num_tensor > 1)
    replicas = f" in each of {num_replicas} replicas," * (num_replicas > 1)
    lines += [
        f"  {arch.num_layers} layers over {counted(num_stages, 'stage')}{ranks},{replicas}"
        f" {topology.transport} transport, {counted(topology.microbatches, 'microbatch', 'es')}"
        " in flight",
    ]
    if not description.deterministic:
        lines.append(f"  not deterministic here: {description.why_not}")
    lines += [f"  gRPC     {host}:{ports.grpc}", f"  HTTP     http://{host}:{ports.http}/v1"]
    lines += [f"  metrics  http://{host}:{ports.metrics}/metrics", "", "Try:"]
    if description.has_tokenizer:
        lines.append(f'  ppserve generate --target {host}:{ports.grpc} "Once upon a time"')
    else:
        lines.append(f"  ppserve health --target {host}:{ports.grpc}    (no tokenizer: send token ids)")
    return "\n".join([*lines, ""])


class StartProgress:
    """A context in which a terminal shows how far each stage has started. Silent if stderr is no terminal."""

    def __init__(self, replicas: Sequence[Members]) -> None:
        self._replicas = replicas
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="progress", daemon=True)

    def __enter__(self) -> None:
        if sys.stderr.isatty():
            self._thread.start()

    def __exit__(self, *_error: object) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _draw(self) -> None:
        while not self._done.wait(_REDRAW_S):
            print("\r\x1b[K" + "  ".join(self._stages()), end="", file=sys.stderr, flush=True)

    def _stages(self) -> list[str]:
        words = []
        for replica, member in ((r, member) for r in self._replicas for member in r.all):
            name, (done, total) = replica.grid.name(member.rank), member.progress
            if member.state is StageState.LOADING and total:
                filled = _BAR * done // total
                words.append(f"{name} [{'#' * filled}{'.' * (_BAR - filled)}] {size(done)}")
            else:
                words.append(f"{name} {_WORDS[member.state]}")
        return words


_WORDS = {
    StageState.ABSENT: "starting",
    StageState.LOADING: "loading",
    StageState.LOADED: "loaded",
    StageState.FORMING: "joining",
    StageState.READY: "ready",
    StageState.LEAVING: "leaving",
}
