"""What `ppserve top` shows: the difference of two readings of a server. All but `read` is pure."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ppserve.bench.ledger import between, read_ledger
from ppserve.bench.scrape import Histogram, MetricsReading, ScrapeFailed, fetch_metrics
from ppserve.client import Client
from ppserve.core.ledger.account import StageTimes
from ppserve.v1 import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class ServerReading:
    """A server at one moment. metrics: None when not wanted, or when `problem` says why they could not be read."""

    at_s: float
    topology: pb.GetTopologyResponse
    metrics: MetricsReading | None
    problem: str = ""


def read(client: Client, metrics: str | None) -> ServerReading:
    """metrics: HOST:PORT of the page, None: not wanted. Raises CallFailed when the server does not answer."""
    topology = client.topology()
    found, problem = None, ""
    if metrics is not None:
        try:
            found = fetch_metrics(metrics, timeout_s=2.0)
        except ScrapeFailed as failure:
            problem = str(failure)
    return ServerReading(time.monotonic(), topology, found, problem)


@dataclass(frozen=True, slots=True)
class Traffic:
    """The metrics page at both ends of an interval. Metrics are named without `ppserve_`."""

    before: MetricsReading
    after: MetricsReading
    interval_s: float

    def now(self, name: str) -> float:
        return self.after.value(f"ppserve_{name}")

    def per_s(self, name: str) -> float:
        # A head that restarted in between counts from zero again.
        return max(0.0, self.now(name) - self.before.value(f"ppserve_{name}")) / self.interval_s

    def latency(self, name: str) -> Histogram:
        """Of the interval."""
        before, after = (page.histogram(f"ppserve_{name}_seconds") for page in (self.before, self.after))
        return after.since(before)


@dataclass(frozen=True, slots=True)
class View:
    """One screen. topology: at the end of the interval. ledger: over the interval. problem: why there is no
    traffic."""

    topology: pb.GetTopologyResponse
    ledger: tuple[StageTimes, ...]
    traffic: Traffic | None
    problem: str = ""


def view_of(before: ServerReading, after: ServerReading) -> View:
    interval_s = max(after.at_s - before.at_s, 1e-9)
    later = read_ledger(after.topology)
    ledger = between(read_ledger(before.topology), later) or later
    traffic = None
    if before.metrics is not None and after.metrics is not None:
        traffic = Traffic(before.metrics, after.metrics, interval_s)
    return View(after.topology, ledger, traffic, after.problem or before.problem)
