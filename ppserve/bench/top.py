"""What `ppserve top` shows: the difference of two readings of a server, as a screen or as one line.

A reading is the topology with its ledger, and the /metrics page.
"""

from __future__ import annotations

import http.client
import math
import textwrap
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from ppserve.bench.ledger import BUSY, between, read_ledger, shares
from ppserve.client import Client
from ppserve.core.figures import counted
from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.causes import CAUSES, IDLE
from ppserve.errors import PpserveError
from ppserve.v1 import generation_pb2 as pb

# A letter for every cause.
_GLYPHS = {BUSY: "█", **dict(zip(CAUSES, "fixrhg", strict=True)), IDLE: "·"}
_SMALLEST_BAR = 10
_LEAST_SHOWN = 0.0005


Labels = frozenset[tuple[str, str]]


class ScrapeFailed(PpserveError):
    """The page could not be fetched, or is no metrics page."""


Buckets = Mapping[float, float]
"""A histogram: cumulative counts by upper bound, ascending; the last is infinite."""


class MetricsReading:
    """All samples of a page at one moment."""

    def __init__(self, samples: Mapping[str, Mapping[Labels, float]]) -> None:
        self._samples = samples

    def value(self, name: str) -> float:
        """The sum of a metric's samples; 0 without any."""
        return sum(self._samples.get(name, {}).values())

    def mean(self, name: str) -> float:
        """The mean of a metric's samples; 0 without any."""
        return self.value(name) / max(1, len(self._samples.get(name, {})))

    def buckets(self, name: str) -> Buckets:
        """Of a histogram, over all labels but its own."""
        buckets: dict[float, float] = {}
        for labels, value in self._samples.get(name + "_bucket", {}).items():
            bound = float(dict(labels)["le"])
            buckets[bound] = buckets.get(bound, 0.0) + value
        return dict(sorted(buckets.items()))


def difference(earlier: Buckets, later: Buckets) -> Buckets:
    """The observations between two readings, or since a restart."""
    added = {bound: count - earlier.get(bound, 0.0) for bound, count in later.items()}
    return added if min(added.values(), default=0.0) >= 0 else later


def quantile(buckets: Buckets, q: float) -> float | None:
    """PromQL's histogram_quantile: linear in a bucket. None without observations."""
    rank = q * buckets.get(math.inf, 0.0)
    low_bound = low_count = 0.0
    for bound, count in buckets.items():
        if count >= rank and count > low_count:
            if math.isinf(bound):
                return low_bound
            return low_bound + (bound - low_bound) * (rank - low_count) / (count - low_count)
        low_bound, low_count = bound, count
    return None


def parse_metrics(text: str) -> MetricsReading:
    """Raises ScrapeFailed with the first bad line."""
    samples: dict[str, dict[Labels, float]] = {}
    for line in text.splitlines():
        try:
            for family in text_string_to_metric_families(line):
                for sample in family.samples:
                    samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
        except ValueError:
            raise ScrapeFailed(f"not a line of metrics: {line[:80]!r}") from None
    return MetricsReading(samples)


def fetch_metrics(address: str, timeout_s: float = 5.0) -> MetricsReading:
    """The page at HOST:PORT. Blocks. Raises ScrapeFailed."""
    url = f"http://{address}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return parse_metrics(response.read().decode())
    except http.client.HTTPException as error:
        raise ScrapeFailed(f"{url}: no HTTP answer ({type(error).__name__})") from None
    except (OSError, ValueError) as error:
        raise ScrapeFailed(f"{url}: {getattr(error, 'reason', error)}") from None


@dataclass(frozen=True, slots=True)
class ServerReading:
    """A server at one moment."""

    at_s: float
    topology: pb.GetTopologyResponse
    metrics: MetricsReading | None
    problem: str = ""
    """Why the metrics could not be read."""


def read(client: Client, metrics: str | None) -> ServerReading:
    """metrics: HOST:PORT of the page, or None. Raises CallFailed without an answer."""
    topology = client.topology()
    found, problem = None, ""
    if metrics is not None:
        try:
            found = fetch_metrics(metrics, timeout_s=2.0)
        except ScrapeFailed as failure:
            problem = str(failure)
    return ServerReading(time.monotonic(), topology, found, problem)


@dataclass(frozen=True, slots=True)
class View:
    """Two readings and what lies between them."""

    before: ServerReading
    after: ServerReading

    @property
    def stages(self) -> Iterator[tuple[str, pb.Stage, StageTimes]]:
        """Name, with the replica of several, stage, and its time."""
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
            facts = ["LOST"] * (not stage.live) + [*_waits(times), f"layers {stage.layers} on {stage.device}"]
            facts += [f"restarted {stage.restarts} x"] * bool(stage.restarts)
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
        before, after = self.before.metrics, self.after.metrics
        if before is None or after is None:
            problem = self.after.problem or self.before.problem
            return [f"no metrics: {problem}"] if problem else []
        interval_s = max(self.after.at_s - self.before.at_s, 1e-9)

        def per_s(name: str) -> float:
            # A head that restarted counts from zero again.
            return max(0.0, after.value(name) - before.value(name)) / interval_s

        def latency(name: str) -> str:
            seconds = difference(before.buckets(name), after.buckets(name))
            p50_s = quantile(seconds, 0.5)
            p99_s = quantile(seconds, 0.99)
            return "-" if p50_s is None or p99_s is None else f"p50 {1e3 * p50_s:.1f} p99 {1e3 * p99_s:.1f} ms"

        return [
            f"running {after.value('ppserve_requests_running'):.0f}"
            f"  waiting {after.value('ppserve_requests_waiting'):.0f}"
            f"  microbatches in flight {after.value('ppserve_microbatches_in_flight'):.0f}"
            f"  KV {after.mean('ppserve_kv_usage_ratio'):.1%}",
            f"{per_s('ppserve_generated_tokens_total'):.1f} tok/s"
            f"  {per_s('ppserve_prompt_tokens_total'):.1f} prompt tok/s"
            f"  {per_s('ppserve_requests_total'):.2f} req/s"
            f"  TTFT {latency('ppserve_time_to_first_token_seconds')}"
            f"  ITL {latency('ppserve_inter_token_latency_seconds')}",
        ]


def bar(times: StageTimes, width: int) -> str:
    """`width` cells. Rounds the ends of shares, not shares, so the number is exact."""
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
