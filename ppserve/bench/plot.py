"""Pictures of runs: throughput and latency, bubbles, and stages over time. Needs matplotlib (`ppserve[plot]`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ppserve.bench.summary import Measurement, Summary, tokens_by_second
from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.causes import CAUSES
from ppserve.errors import ConfigError

_BUSY_COLOURS = {"prefill": "#2f6f9f", "mixed": "#4f97c4", "decode": "#8fc1dd"}
_CAUSE_COLOURS = dict(zip(CAUSES, ("#e0a030", "#c04040", "#8050a0", "#d080b0", "#707070", "#4f9d69"), strict=True))
_MOST_SPANS = 600


def check_plot(path: Path) -> None:
    """Raises ConfigError for what cannot be drawn: called before a long run, not after it."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot", "needs matplotlib: pip install 'ppserve[plot]'")
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in known:
        raise ConfigError("--plot", f"{path}: no picture is called {path.suffix}; one of {', '.join(known)}")


def draw(path: Path, summaries: Sequence[Summary], measured: Sequence[Measurement], trace: Path | None) -> None:
    """One picture: a sweep against concurrency, or one run over time. trace: a Chrome trace of the server, drawn
    as stages over time. Raises OSError, and ConfigError for a file that is no trace."""
    spans = read_spans(trace) if trace is not None else []
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7.5 if spans else 4), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2 if spans else 1, 3)
    throughput, latency, bubbles = (figure.add_subplot(grid[0, column]) for column in range(3))
    if len(summaries) > 1:
        ordered = sorted(summaries, key=lambda one: one.setting.max_concurrency or 0)
        _draw_throughput(throughput, ordered)
        _draw_latency(latency, ordered)
    else:
        _draw_tokens_over_time(throughput, measured[0])
        _draw_latency_shares(latency, measured[0])
    _draw_bubbles(bubbles, summaries[-1].stages)
    if spans:
        _draw_stages(figure.add_subplot(grid[1, :]), spans)
    setting = summaries[0].setting
    figure.suptitle(f"{setting.model_id}, {setting.dtype}, {setting.num_stages} stages")
    figure.savefig(path, dpi=120)


# ---- stages over time ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """An interval of a stage's time, on the trace's clock. kind: a phase (busy) or a cause (bubble)."""

    stage: int
    start_s: float
    duration_s: float
    kind: str


def read_spans(path: Path) -> list[TraceSpan]:
    """The middle of a trace: as many intervals as a picture can show.

    A trace that the server is still writing has no closing bracket yet. Raises OSError, ConfigError.
    """
    text = path.read_text(errors="replace").rstrip().rstrip(",")
    try:
        events: list[dict[str, Any]] = json.loads(text if text.endswith("]") else text + "]")
        drawn = [event for event in events if event.get("ph") == "X"]
        spans = sorted((_span(event) for event in drawn), key=lambda span: span.start_s)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("--stage-trace", f"{path} is not a trace of ppserve: {error}") from None
    if not spans:
        raise ConfigError("--stage-trace", f"{path} holds no steps")
    skipped = max(0, (len(spans) - _MOST_SPANS) // 2)
    return spans[skipped : skipped + _MOST_SPANS]


def _span(event: dict[str, Any]) -> TraceSpan:
    kind = event["name"] if event["cat"] == "bubble" else event["cat"]
    return TraceSpan(int(event["pid"]), event["ts"] / 1e6, event["dur"] / 1e6, kind)


def _draw_stages(axes: Any, spans: Sequence[TraceSpan]) -> None:
    begun_s = spans[0].start_s
    for kind, colour in {**_BUSY_COLOURS, **_CAUSE_COLOURS}.items():
        label: str | None = kind
        for stage in sorted({span.stage for span in spans}):
            bars = [
                (1e3 * (span.start_s - begun_s), 1e3 * span.duration_s)
                for span in spans
                if span.kind == kind and span.stage == stage
            ]
            if bars:
                height = 0.8 if kind in _BUSY_COLOURS else 0.4
                axes.broken_barh(bars, (stage - height / 2, height), facecolors=colour, label=label)
                label = None
    stages = sorted({span.stage for span in spans})
    axes.set(title="stages over time", xlabel="ms", yticks=stages, yticklabels=[f"stage {s}" for s in stages])
    axes.invert_yaxis()
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")


# ---- a sweep ---------------------------------------------------------------------------------------------------


def _draw_throughput(axes: Any, summaries: Sequence[Summary]) -> None:
    concurrency = [one.setting.max_concurrency for one in summaries]
    axes.plot(concurrency, [one.output_throughput for one in summaries], "o-")
    axes.set(title="throughput", xlabel="concurrent requests", ylabel="output tokens/s", ylim=(0, None))
    _octaves(axes, concurrency)


def _draw_latency(axes: Any, summaries: Sequence[Summary]) -> None:
    concurrency = [one.setting.max_concurrency for one in summaries]
    for name, colour in (("ttft", "C0"), ("itl", "C1")):
        for statistic, style in (("median", "o-"), ("p99", "o--")):
            values = [getattr(getattr(one, name), statistic) for one in summaries]
            axes.plot(concurrency, values, style, color=colour, label=f"{statistic} {name.upper()}")
    axes.set(title="latency", xlabel="concurrent requests", ylabel="ms", yscale="log")
    _octaves(axes, concurrency)
    axes.legend(fontsize="small")


def _octaves(axes: Any, concurrency: Sequence[int | None]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(concurrency, [str(count) for count in concurrency])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


# ---- one run ---------------------------------------------------------------------------------------------------


def _draw_tokens_over_time(axes: Any, measured: Measurement) -> None:
    tokens = tokens_by_second(measured.answers)
    seconds = range(max(tokens, default=0) + 1)
    axes.stairs([tokens.get(second, 0) for second in seconds], range(len(seconds) + 1), fill=True, alpha=0.7)
    axes.set(title="throughput over time", xlabel="s", ylabel="output tokens/s")
    axes.grid(alpha=0.3)


def _draw_latency_shares(axes: Any, measured: Measurement) -> None:
    answers = [answer for answer in measured.answers if answer.arrivals]
    for name, seconds in (
        ("TTFT", [answer.ttft_s for answer in answers]),
        ("ITL", [gap for answer in answers for gap in answer.itls_s]),
        ("E2EL", [answer.e2e_s for answer in answers]),
    ):
        values = sorted(1e3 * value for value in seconds)
        if values:
            axes.plot(values, [(place + 1) / len(values) for place in range(len(values))], label=name)
    axes.set(title="latency", xlabel="ms", ylabel="share at or below", xscale="log", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    if answers:
        axes.legend(fontsize="small")


def _draw_bubbles(axes: Any, ledger: tuple[StageTimes, ...]) -> None:
    """Bubbles of the (last) run, stacked by cause."""
    stages = [str(stage) for stage in range(len(ledger))]
    bottoms = [0.0] * len(ledger)
    for cause in CAUSES:
        shares = [100 * times.bubble_share(cause) for times in ledger]
        axes.bar(stages, shares, bottom=bottoms, color=_CAUSE_COLOURS[cause], label=cause)
        bottoms = [bottom + share for bottom, share in zip(bottoms, shares, strict=True)]
    axes.set(title="bubbles", xlabel="stage", ylabel="% of the time with work")
    if ledger:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", reverse=True)
