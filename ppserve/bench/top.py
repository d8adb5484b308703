"""What `ppserve top` shows: the difference of two readings, as a screen or as one line.

A reading is the topology with its ledger, and the load.
"""

from __future__ import annotations

import http.client
import json
import textwrap
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ppserve.bench.ledger import BUSY, between, read_ledger, shares
from ppserve.client import Client
from ppserve.client.connection import is_this_host
from ppserve.core.figures import counted
from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.causes import CAUSES, IDLE
from ppserve.errors import PpserveError
from ppserve.v1 import generation_pb2 as pb

# The character that draws each kind of time.
_GLYPHS = {BUSY: "█", **dict(zip(CAUSES, "fixrhg", strict=True)), IDLE: "·"}
_SMALLEST_BAR = 10
_LEAST_SHOWN = 0.0005
_COUNTERS = ("generated_tokens", "prompt_tokens", "requests")
_FIGURES = {*_COUNTERS, "running", "waiting", "in_flight", "kv_usage", "ttft", "itl"}

Figures = Mapping[str, Any]
"""A server's `/load.json`: its load, and counters and latencies since its start."""


class ScrapeFailed(PpserveError):
    """The metrics page could not be fetched, or the address has another page."""


def quantile(bounds_s: Sequence[float], counts: Sequence[int], q: float) -> float | None:
    """Estimate a quantile as PromQL's histogram_quantile does, linearly in a bucket; None without observations.
    counts: the number of values up to each bound, and last the number of all values."""
    rank = q * counts[-1]
    low_bound = low_count = 0.0
    for bound, count in zip(bounds_s, counts, strict=False):
        if count >= rank and count > low_count:
            return low_bound + (bound - low_bound) * (rank - low_count) / (count - low_count)
        low_bound, low_count = bound, count
    return low_bound if counts[-1] > low_count else None


def fetch_figures(address: str, timeout_s: float = 5.0) -> Figures:
    """Read the figures from a server's metrics port, which blocks. Raises ScrapeFailed."""
    return fetch_json(address, "/load.json", _FIGURES, timeout_s)


def fetch_json(address: str, path: str, keys: Set[str], timeout_s: float) -> dict[str, Any]:
    """Read a page of a server's metrics port, an object with these keys, which blocks. Raises ScrapeFailed."""
    url = f"http://{address}{path}"
    try:
        proxies = urllib.request.ProxyHandler({} if is_this_host(address) else None)
        with urllib.request.build_opener(proxies).open(url, timeout=timeout_s) as response:
            page = json.load(response)
        if not isinstance(page, dict) or not page.keys() >= keys:
            raise ValueError("is not the page of a ppserve server")
        return page
    except http.client.HTTPException as error:
        raise ScrapeFailed(f"{url}: no HTTP answer ({type(error).__name__}), so no metrics port") from None
    except (OSError, ValueError) as error:
        raise ScrapeFailed(f"{url}: {getattr(error, 'reason', error)}") from None


@dataclass(frozen=True, slots=True)
class ServerReading:
    """A server at one moment."""

    at_s: float
    topology: pb.GetTopologyResponse
    figures: Figures | None
    problem: str = ""  # why there are no figures


def read(client: Client, metrics: str | None) -> ServerReading:
    """Read the server now. metrics: HOST:PORT of its metrics port; None = no figures. Raises CallFailed if the
    server does not answer; if only the metrics port does not, the reading has the problem."""
    topology = client.topology()
    found, problem = None, ""
    if metrics is not None:
        try:
            found = fetch_figures(metrics, timeout_s=2.0)
        except ScrapeFailed as failure:
            problem = str(failure)
    return ServerReading(time.monotonic(), topology, found, problem)


@dataclass(frozen=True, slots=True)
class View:
    """Two readings and the difference between them."""

    before: ServerReading
    after: ServerReading

    @property
    def stages(self) -> Iterator[tuple[str, pb.Stage, StageTimes]]:
        """Yield each stage's name (`replica.stage` if there are several replicas), the stage, and its time."""
        topology = self.after.topology
        later = read_ledger(topology)
        ledger = between(read_ledger(self.before.topology), later) or later
        for stage, times in zip(topology.stages, ledger, strict=True):
            several = len(topology.replicas) > 1
            yield f"{stage.replica}.{stage.stage}" if several else str(stage.stage), stage, times

    def render_screen(self, target: str, width: int) -> list[str]:
        """The whole view; no line is wider than `width` characters."""
        topology = self.after.topology
        head = (
            f"ppserve {target}   {_shape(topology)} over {topology.transport},"
            f" up to {counted(topology.microbatches, 'microbatch', 'es')}, epoch {topology.epoch}"
        )
        lines = [line[:width] for line in (head, *self._traffic(), "")]
        for place, stage, times in self.stages:
            name = f"stage {place:<3}"
            percent = f" {shares(times)[BUSY]:6.1%} busy"
            cells = max(_SMALLEST_BAR, width - len(name) - len(percent) - 1)
            lines.append(name + bar(times, cells) + percent)
            facts = [*_waits(times), f"layers {stage.layers} on {stage.device}"]
            if not stage.live:
                facts.insert(0, "LOST")
            if stage.restarts:
                facts.append(f"restarted {stage.restarts} x")
            lines.append((" " * len(name) + "  ".join(facts))[:width])
        legend = (f"{glyph} {kind}" for kind, glyph in _GLYPHS.items())
        return [*lines, "", "  ".join(legend), *textwrap.wrap(topology.advice, max(width, _SMALLEST_BAR))]

    def render_line(self, time_of_day: str) -> str:
        """The view in one line, for logs and pipes."""
        parts = [time_of_day]
        for place, stage, times in self.stages:
            name = f"stage {place}" + ("" if stage.live else " LOST")
            parts.append(f"{name}: busy {shares(times)[BUSY]:.1%} {' '.join(_waits(times))}")
        return " | ".join([*parts, *self._traffic()])

    def _traffic(self) -> list[str]:
        before, after = self.before.figures, self.after.figures
        if before is None or after is None:
            problem = self.after.problem or self.before.problem
            return [f"no metrics: {problem}"] if problem else []
        interval_s = max(self.after.at_s - self.before.at_s, 1e-9)
        # A head that restarted counts from zero again.
        tokens_s, prompt_s, requests_s = (max(0.0, after[name] - before[name]) / interval_s for name in _COUNTERS)
        return [
            f"running {after['running']}  waiting {after['waiting']}"
            f"  microbatches in flight {after['in_flight']}  KV {after['kv_usage']:.1%}",
            f"{tokens_s:.1f} tok/s  {prompt_s:.1f} prompt tok/s  {requests_s:.2f} req/s"
            f"  TTFT {_latency(before['ttft'], after['ttft'])}  ITL {_latency(before['itl'], after['itl'])}",
        ]


def _latency(before: Figures, after: Figures) -> str:
    """The median and the 99th percentile of the values between two readings, or since a restart between them."""
    added = [now - then for now, then in zip(after["counts"], before["counts"], strict=True)]
    counts = added if min(added) >= 0 else after["counts"]
    p50_s, p99_s = (quantile(after["bounds_s"], counts, q) for q in (0.5, 0.99))
    return "-" if p50_s is None or p99_s is None else f"p50 {1e3 * p50_s:.1f} p99 {1e3 * p99_s:.1f} ms"


def bar(times: StageTimes, width: int) -> str:
    """A bar of exactly `width` cells: the ends of shares are rounded, not the shares themselves."""
    cells, reached = "", 0.0
    for kind, share in shares(times).items():
        reached += share
        cells += _GLYPHS[kind] * (round(reached * width) - len(cells))
    return cells.ljust(width, _GLYPHS[IDLE])


def _shape(topology: pb.GetTopologyResponse) -> str:
    count = len(topology.replicas)
    stages = counted(len(topology.stages) // max(1, count), "stage")
    if topology.stages and (num_tensor := len(topology.stages[0].ranks)) > 1:
        stages += f" of {num_tensor} tensor ranks"
    return f"{count} replicas of {stages}" if count > 1 else stages


def _waits(times: StageTimes) -> list[str]:
    waits = {kind: share for kind, share in shares(times).items() if kind != BUSY}
    return [f"{kind} {share:.1%}" for kind, share in waits.items() if share >= _LEAST_SHOWN or kind == IDLE]
