"""`ppserve top` as text: a screen for terminals, a line for everything else. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import groupby

from ppserve.bench.ledger import CAUSES, StageTime
from ppserve.bench.top import LatencyQuantiles, StageLine, Traffic, View

BUSY = "busy"
IDLE = "idle"
# A letter for every cause, so that the bars say the same without colours.
_GLYPHS = {BUSY: "█", **dict(zip(CAUSES, "fixrh", strict=True)), IDLE: "·"}
_COLOURS = {BUSY: 32, **dict(zip(CAUSES, (33, 31, 35, 95, 36), strict=True)), IDLE: 90}
_LOST_COLOUR = 31
_SMALLEST_BAR = 10
_VISIBLE = 0.0005


def render_screen(view: View, target: str, width: int, colours: bool) -> list[str]:
    """The whole view, no line wider than `width` characters."""
    lines = [
        f"ppserve {target}   {len(view.stages)} stages over {view.transport}, up to {view.microbatches}"
        f" microbatches, epoch {view.epoch}",
        *_traffic_or_problem(view),
        "",
    ]
    lines = [line[:width] for line in lines]
    for line, times in zip(view.stages, view.ledger, strict=True):
        lines += list(_stage_lines(line, times, width, colours))
    lines += ["", _legend(colours)]
    if view.advice:
        lines += ["", *_wrapped(view.advice, width)]
    return lines


def render_line(view: View, clock: str) -> str:
    """The view in one line, for logs and pipes. clock: what to put first."""
    parts = [clock]
    for line, times in zip(view.stages, view.ledger, strict=True):
        causes = "".join(f" {cause} {100 * share:.1f}%" for cause, share in _bubbles(times) if share >= _VISIBLE)
        state = "" if line.live else " LOST"
        parts.append(f"stage {line.stage}{state}: busy {100 * _busy(times):.1f}%{causes} idle {_idle(times):.1f}%")
    if traffic := _traffic_or_problem(view):
        parts.append("; ".join(traffic))
    return " | ".join(parts)


def shares(times: StageTime) -> list[tuple[str, float]]:
    """A stage's wall time by kind, busy first, idle last; they sum to 1. A stage without time is idle."""
    return [(BUSY, _busy(times)), *_bubbles(times), (IDLE, times.idle_share if times.wall_s else 1.0)]


def bar(times: StageTime, width: int, colours: bool) -> str:
    """`width` cells, each of the kind that fills most of it: rounding where shares meet, never losing a cell."""
    kinds: list[str] = []
    reached = 0.0
    for kind, share in shares(times):
        reached += share
        kinds += [kind] * (round(reached * width) - len(kinds))
    kinds += [IDLE] * (width - len(kinds))
    if not colours:
        return "".join(_GLYPHS[kind] for kind in kinds)
    return "".join(_coloured(_GLYPHS[kind] * len(list(run)), _COLOURS[kind]) for kind, run in groupby(kinds))


def _stage_lines(line: StageLine, times: StageTime, width: int, colours: bool) -> Iterator[str]:
    name = f"stage {line.stage:<3}"
    percent = f" {100 * _busy(times):5.1f}% busy"
    yield name + bar(times, max(_SMALLEST_BAR, width - len(name) - len(percent) - 1), colours) + percent
    facts = [f"{cause} {100 * share:.1f}%" for cause, share in _bubbles(times) if share >= _VISIBLE]
    facts += [f"idle {_idle(times):.1f}%", f"layers {line.layers} on {line.device}"]
    if line.restarts:
        facts.append(f"started again {line.restarts} x")
    text = (" " * len(name) + "  ".join(facts))[:width]
    yield text if line.live else _coloured(f"{' ' * len(name)}LOST  {text.strip()}"[:width], _LOST_COLOUR, colours)


def _traffic_or_problem(view: View) -> list[str]:
    if view.traffic is not None:
        return _traffic_lines(view.traffic)
    return [f"no metrics: {view.problem}"] if view.problem else []


def _traffic_lines(traffic: Traffic) -> list[str]:
    return [
        f"running {traffic.running}  waiting {traffic.waiting}  microbatches in flight {traffic.in_flight}"
        f"  KV {100 * traffic.kv_usage:.1f}%",
        f"{traffic.generated_tokens_per_s:.1f} tok/s  {traffic.prompt_tokens_per_s:.1f} prompt tok/s"
        f"  {traffic.requests_per_s:.2f} req/s  TTFT {_latency(traffic.ttft)}  ITL {_latency(traffic.itl)}",
    ]


def _latency(latency: LatencyQuantiles) -> str:
    if latency.p50_s is None or latency.p99_s is None:
        return "-"
    return f"p50 {1e3 * latency.p50_s:.1f} p99 {1e3 * latency.p99_s:.1f} ms"


def _legend(colours: bool) -> str:
    return "  ".join(f"{_coloured(glyph, _COLOURS[kind], colours)} {kind}" for kind, glyph in _GLYPHS.items())


def _bubbles(times: StageTime) -> list[tuple[str, float]]:
    """Shares of wall time."""
    wall_s = times.wall_s or 1.0
    return [(cause, times.bubble_s.get(cause, 0.0) / wall_s) for cause in CAUSES]


def _busy(times: StageTime) -> float:
    return times.busy_s / times.wall_s if times.wall_s else 0.0


def _idle(times: StageTime) -> float:
    """In percent."""
    return 100 * (times.idle_share if times.wall_s else 1.0)


def _coloured(text: str, colour: int, colours: bool = True) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if colours else text


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, _SMALLEST_BAR))
