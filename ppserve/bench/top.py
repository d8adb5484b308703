"""What `ppserve top` shows: the difference of two readings, as a screen or as one line.

A reading is the topology with its ledger, and the load. A screen's line consists of pieces of text, each with a
word for its colour: a kind of time, `good`, `bad`, `soft`, or an empty one.
"""

from __future__ import annotations

import http.client
import json
import textwrap
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from ppserve.bench.ledger import BUSY, between, read_ledger, shares
from ppserve.client import Client
from ppserve.client.connection import host_of, is_this_host
from ppserve.core.figures import counted, quantile
from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.causes import CAUSES, IDLE, MEANINGS
from ppserve.errors import PpserveError
from ppserve.v1 import generation_pb2 as pb

# The character that draws each kind of time.
_GLYPHS = {BUSY: "█", **dict(zip(CAUSES, "fixrhg", strict=True)), IDLE: "·"}
_STATES = {"away": "away", "loading": "loads its weights", "waiting": "waits for the others"}
"""What the server says of a stage that does not compute, in words."""
_SMALLEST_BAR = 10
_LEAST_SHOWN = 0.0005
_COUNTERS = ("generated_tokens", "prompt_tokens", "requests")
_FIGURES = {*_COUNTERS, "running", "waiting", "in_flight", "kv_usage", "ttft", "itl"}

Line = list[tuple[str, str]]
"""The pieces of a screen's line: word for the colour, text."""
Figures = Mapping[str, Any]
"""A server's `/load.json`: its load, and counters and latencies since its start."""


class ScrapeFailed(PpserveError):
    """The metrics page could not be fetched, or the address has another page."""


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


def read(client: Client, target: str, metrics: str | None) -> ServerReading:
    """Read the server now. target: the client's. metrics: HOST:PORT of the server's metrics port; empty = no
    figures, None = where the server says. Raises CallFailed if the server does not answer; if only the metrics
    port does not, the reading has the problem."""
    topology = client.topology()
    found, problem = None, ""
    address = _told_address(target, topology) if metrics is None else metrics
    if address:
        try:
            found = fetch_figures(address, timeout_s=2.0)
        except ScrapeFailed as failure:
            problem = str(failure)
    return ServerReading(time.monotonic(), topology, found, problem)


def _told_address(target: str, topology: pb.GetTopologyResponse) -> str:
    """Return the HOST:PORT of the metrics of the server at `target`; an empty text if it does not tell it."""
    host = host_of(target)
    if not (host and topology.metrics_port):
        return ""
    return f"[{host}]:{topology.metrics_port}" if ":" in host else f"{host}:{topology.metrics_port}"


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

    def render_screen(self, target: str, width: int, explains: bool = False) -> list[Line]:
        """Return the whole view in lines of at most `width` characters, which is 40 at least. explains: with the
        meanings of the kinds of time."""
        topology = self.after.topology
        head = [
            ("", f"ppserve {target}"),
            ("good" if topology.status == "serving" else "bad", topology.status),
            ("", f"{_shape(topology)} over {topology.transport}"),
            ("", f"up to {counted(topology.microbatches, 'microbatch', 'es')}"),
            ("", f"epoch {topology.epoch}"),
        ]
        lines = [*_flow(head, width), *(line for row in self._traffic() for line in _flow(row, width)), []]
        for place, stage, times in self.stages:
            lines += _stage_lines(place, stage, times, width)
        legend = _flow(((kind, f"{glyph} {kind}") for kind, glyph in _GLYPHS.items()), width)
        lines += [[], *(_explain(width) if explains else legend)]
        return [*lines, *([("", line)] for line in textwrap.wrap(topology.advice, width))]

    def render_line(self, time_of_day: str) -> str:
        """Return the view in one line, for logs and pipes."""
        parts = [time_of_day]
        for place, stage, times in self.stages:
            name = f"stage {place} {_STATES.get(stage.state, '')}".rstrip()
            waits = " ".join(text for _, text in _waits(times))
            parts.append(f"{name}: busy {shares(times)[BUSY]:.1%} {waits}")
        return " | ".join([*parts, *("  ".join(text for _, text in row) for row in self._traffic())])

    def _traffic(self) -> list[Line]:
        """Return what the metrics say, in rows."""
        before, after = self.before.figures, self.after.figures
        if before is None or after is None:
            problem = self.after.problem or self.before.problem
            return [[("bad", f"no metrics: {problem}")]] if problem else []
        interval_s = max(self.after.at_s - self.before.at_s, 1e-9)
        # A head that restarted counts from zero again.
        tokens_s, prompt_s, requests_s = (max(0.0, after[name] - before[name]) / interval_s for name in _COUNTERS)
        now = (
            f"running {after['running']}", f"waiting {after['waiting']}",
            f"microbatches in flight {after['in_flight']}", f"KV {after['kv_usage']:.1%}",
        )  # fmt: skip
        rates = f"{tokens_s:.1f} tok/s", f"{prompt_s:.1f} prompt tok/s", f"{requests_s:.2f} req/s"
        ttft, itl = (_latency(before[name], after[name]) for name in ("ttft", "itl"))
        return [[("", text) for text in row] for row in (now, (*rates, f"TTFT {ttft}", f"ITL {itl}"))]


def _flow(pieces: Iterable[tuple[str, str]], width: int, indent: int = 0) -> list[Line]:
    """Return lines of these pieces, two spaces between them. A piece that is wider than a line is cut."""
    lines: list[Line] = []
    left = 0  # cells of the last line
    for word, text in pieces:
        if left < len(text) + 2:
            lines.append([("", " " * indent)])
            left = width - indent
        else:
            lines[-1].append(("", "  "))
            left -= 2
        lines[-1].append((word, text[:left]))
        left -= len(text)
    return lines


def _stage_lines(place: str, stage: pb.Stage, times: StageTimes, width: int) -> list[Line]:
    """Return a stage's bar, and below it what it waits for, what it has and whether it is there."""
    name, percent = f"stage {place:<3}", f" {shares(times)[BUSY]:6.1%} busy"
    cells = max(_SMALLEST_BAR, width - len(name) - len(percent))
    facts = [*_waits(times), ("soft", f"layers {stage.layers} on {stage.device}")]
    if state := _STATES.get(stage.state):
        facts.insert(0, ("bad", state))
    if stage.restarts:
        facts.append(("soft", f"restarted {stage.restarts} x"))
    return [[("", name), *bar(times, cells), ("", percent)], *_flow(facts, width, len(name))]


def _explain(width: int) -> Iterator[Line]:
    """Return what each kind of time is, and what makes less of it."""
    meanings = {kind: ". ".join(filter(None, (MEANINGS[kind].what, MEANINGS[kind].helps))) for kind in CAUSES}
    for kind, meaning in {BUSY: "stages compute", **meanings, IDLE: MEANINGS[IDLE].what}.items():
        first, *others = textwrap.wrap(f"{_GLYPHS[kind]} {kind}: {meaning}.", width, subsequent_indent="  ")
        yield [(kind, first[0]), ("", first[1:])]
        yield from ([("", line)] for line in others)


def _latency(before: Figures, after: Figures) -> str:
    """Return the median and the 99th percentile of the values between two readings, or since a restart between
    them."""
    added = [now - then for now, then in zip(after["counts"], before["counts"], strict=True)]
    counts = added if min(added) >= 0 else after["counts"]
    p50_s, p99_s = (quantile(after["bounds_s"], counts, q) for q in (0.5, 0.99))
    return "-" if p50_s is None or p99_s is None else f"p50 {1e3 * p50_s:.1f} p99 {1e3 * p99_s:.1f} ms"


def bar(times: StageTimes, width: int) -> Line:
    """Return a bar of exactly `width` cells: the ends of shares are rounded, not the shares themselves."""
    line, reached, drawn = [], 0.0, 0
    for kind, share in shares(times).items():
        reached += share
        end = width if kind == IDLE else round(reached * width)
        line.append((kind, _GLYPHS[kind] * (end - drawn)))
        drawn = end
    return line


def _shape(topology: pb.GetTopologyResponse) -> str:
    count = len(topology.replicas)
    stages = counted(len(topology.stages) // max(1, count), "stage")
    if topology.stages and (num_tensor := len(topology.stages[0].ranks)) > 1:
        stages += f" of {num_tensor} tensor ranks"
    return f"{count} replicas of {stages}" if count > 1 else stages


def _waits(times: StageTimes) -> Line:
    waits = {kind: share for kind, share in shares(times).items() if kind != BUSY}
    return [("", f"{kind} {share:.1%}") for kind, share in waits.items() if share >= _LEAST_SHOWN or kind == IDLE]
