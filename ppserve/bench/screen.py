"""`ppserve top` as text: a screen for terminals, a line for everything else. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import groupby

from ppserve.bench.scrape import Histogram
from ppserve.bench.top import Traffic, View
from ppserve.core.figures import counted
from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.causes import CAUSES, IDLE
from ppserve.v1 import generation_pb2 as pb

BUSY = "busy"
# A letter for every cause, so that bars can be read without colours.
_GLYPHS = {BUSY: "█", **dict(zip(CAUSES, "fixrhg", strict=True)), IDLE: "·"}
_COLOURS = {BUSY: 32, **dict(zip(CAUSES, (33, 31, 35, 95, 36, 34), strict=True)), IDLE: 90}
_LOST_COLOUR = 31
_SMALLEST_BAR = 10
_VISIBLE = 0.0005


def render_screen(view: View, target: str, width: int, colours: bool) -> list[str]:
    """The whole view; no line is wider than `width` characters."""
    topology = view.topology
    lines = [
        f"ppserve {target}   {_shape(topology)} over {topology.transport},"
        f" up to {counted(topology.microbatches, 'microbatch', 'es')}, epoch {topology.epoch}",
        *_traffic_or_problem(view),
        "",
    ]
    lines = [line[:width] for line in lines]
    for stage, times in zip(topology.stages, view.ledger, strict=True):
        lines += list(_stage_lines(stage, _place(stage, topology), times, width, colours))
    lines += ["", _legend(colours)]
    if topology.advice:
        lines += ["", *textwrap.wrap(topology.advice, max(width, _SMALLEST_BAR))]
    return lines


def render_line(view: View, clock: str) -> str:
    """The view in one line, for logs and pipes. clock: the time of day, which comes first."""
    parts = [clock]
    for stage, times in zip(view.topology.stages, view.ledger, strict=True):
        name = f"stage {_place(stage, view.topology)}" + ("" if stage.live else " LOST")
        parts.append(f"{name}: busy {shares(times)[BUSY]:.1%} {' '.join(_waits(times))}")
    if traffic := _traffic_or_problem(view):
        parts.append("; ".join(traffic))
    return " | ".join(parts)


def shares(times: StageTimes) -> dict[str, float]:
    """Shares of a stage's wall time by kind, busy first, idle last, which sum to 1. Without time, all is idle."""
    spent_ns = {BUSY: times.computed_ns, **times.bubble_ns, IDLE: times.idle_ns if times.wall_ns else 1}
    return {kind: ns / (times.wall_ns or 1) for kind, ns in spent_ns.items()}


def bar(times: StageTimes, width: int, colours: bool) -> str:
    """`width` cells. The ends of the shares are rounded, not the shares, so that the number of cells is exact."""
    kinds: list[str] = []
    reached = 0.0
    for kind, share in shares(times).items():
        reached += share
        kinds += [kind] * (round(reached * width) - len(kinds))
    kinds += [IDLE] * (width - len(kinds))
    if not colours:
        return "".join(_GLYPHS[kind] for kind in kinds)
    return "".join(_coloured(_GLYPHS[kind] * len(list(run)), _COLOURS[kind]) for kind, run in groupby(kinds))


def _shape(topology: pb.GetTopologyResponse) -> str:
    count = len(topology.replicas)
    stages = counted(len(topology.stages) // max(1, count), "stage")
    if topology.stages and (num_tensor := len(topology.stages[0].ranks)) > 1:
        stages += f" of {num_tensor} tensor ranks"
    return f"{count} replicas of {stages}" if count > 1 else stages


def _place(stage: pb.Stage, topology: pb.GetTopologyResponse) -> str:
    """Its number; behind that of its replica, where there are several."""
    return f"{stage.replica}.{stage.stage}" if len(topology.replicas) > 1 else str(stage.stage)


def _stage_lines(stage: pb.Stage, place: str, times: StageTimes, width: int, colours: bool) -> Iterator[str]:
    name = f"stage {place:<3}"
    percent = f" {shares(times)[BUSY]:6.1%} busy"
    yield name + bar(times, max(_SMALLEST_BAR, width - len(name) - len(percent) - 1), colours) + percent
    facts = [*_waits(times), f"layers {stage.layers} on {stage.device}"]
    if stage.restarts:
        facts.append(f"started again {stage.restarts} x")
    text = (" " * len(name) + "  ".join(facts))[:width]
    lost = f"{' ' * len(name)}LOST  {text.strip()}"[:width]
    yield text if stage.live else _coloured(lost, _LOST_COLOUR, colours)


def _traffic_or_problem(view: View) -> list[str]:
    if view.traffic is not None:
        return _traffic_lines(view.traffic)
    return [f"no metrics: {view.problem}"] if view.problem else []


def _traffic_lines(traffic: Traffic) -> list[str]:
    now, per_s = traffic.now, traffic.per_s
    # The mean: each replica has its own.
    kv_usage = now("kv_usage_ratio") / max(1, traffic.after.num("ppserve_kv_usage_ratio"))
    return [
        f"running {now('requests_running'):.0f}  waiting {now('requests_waiting'):.0f}"
        f"  microbatches in flight {now('microbatches_in_flight'):.0f}  KV {kv_usage:.1%}",
        f"{per_s('generated_tokens_total'):.1f} tok/s  {per_s('prompt_tokens_total'):.1f} prompt tok/s"
        f"  {per_s('requests_total'):.2f} req/s  TTFT {_latency(traffic.latency('time_to_first_token'))}"
        f"  ITL {_latency(traffic.latency('inter_token_latency'))}",
    ]


def _latency(seconds: Histogram) -> str:
    p50_s, p99_s = seconds.quantile(0.5), seconds.quantile(0.99)
    return "-" if p50_s is None or p99_s is None else f"p50 {1e3 * p50_s:.1f} p99 {1e3 * p99_s:.1f} ms"


def _legend(colours: bool) -> str:
    return "  ".join(f"{_coloured(glyph, _COLOURS[kind], colours)} {kind}" for kind, glyph in _GLYPHS.items())


def _waits(times: StageTimes) -> list[str]:
    """Bubbles that are large enough to be seen, and the idle time, as shares of wall time."""
    waits = {kind: share for kind, share in shares(times).items() if kind != BUSY}
    return [f"{kind} {share:.1%}" for kind, share in waits.items() if share >= _VISIBLE or kind == IDLE]


def _coloured(text: str, colour: int, colours: bool = True) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if colours else text
