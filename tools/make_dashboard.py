"""Write deploy/grafana/ppserve.json: the dashboard, from one line per panel.

python tools/make_dashboard.py            # writes it
python tools/make_dashboard.py --check    # writes nothing; fails when it is out of date
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "ppserve.json"
SOURCE = {"type": "prometheus", "uid": "${source}"}
WHERE = 'instance=~"$instance"'
COLOURS = {
    "busy prefill": "#1d4e89",
    "busy decode": "#22867a",
    "busy mixed": "#3a75a8",
    "fill_drain": "#e9b44c",
    "imbalance": "#c8442f",
    "transfer": "#7b5ea7",
    "token_return": "#d77fa1",
    "host": "#7c8794",
    "gather": "#4f9d69",
    "idle": "#d0ccc5",
}


@dataclass(frozen=True)
class Panel:
    """queries: (expression, legend). width: of 24 columns. repeat: a variable, one panel for each value."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    width: int = 8
    height: int = 8
    kind: str = "timeseries"
    description: str = ""
    stacked: bool = False
    repeat: str = ""
    colours: dict[str, str] = field(default_factory=dict)
    top: float | None = None


def rate(name: str, by: str = "", where: str = "") -> str:
    """Summed per-second rate."""
    labels = f"{WHERE}, {where}" if where else WHERE
    return f"sum by ({by}) (rate({name}{{{labels}}}[$__rate_interval]))"


def quantiles(name: str) -> tuple[tuple[str, str], ...]:
    """p50, p90 and p99 of a histogram."""
    buckets = rate(f"{name}_bucket", "le")
    return tuple((f"histogram_quantile({q}, {buckets})", f"p{round(100 * q)}") for q in (0.5, 0.9, 0.99))


STAGE = 'replica="$replica", stage="$stage"'
LEDGER = Panel(
    "Stage $stage of replica $replica: where its time went",
    (
        (rate("ppserve_stage_busy_seconds_total", "phase", STAGE), "busy {{phase}}"),
        (rate("ppserve_stage_bubble_seconds_total", "cause", STAGE), "{{cause}}"),
        (rate("ppserve_stage_idle_seconds_total", "stage", STAGE), "idle"),
    ),
    "percentunit",
    width=24,
    height=7,
    description="Busy, bubbles by cause, and idle are all of a stage's time: the stack reaches 100%.",
    stacked=True,
    repeat="stage",
    colours=COLOURS,
    top=1.0,
)
PANELS = (
    LEDGER,
    Panel("Time to first token", quantiles("ppserve_time_to_first_token_seconds"), "s"),
    Panel("Inter-token latency", quantiles("ppserve_inter_token_latency_seconds"), "s"),
    Panel("Request duration", quantiles("ppserve_request_duration_seconds"), "s"),
    Panel(
        "Tokens",
        (
            (rate("ppserve_generated_tokens_total"), "generated"),
            (rate("ppserve_prompt_tokens_total"), "prompt"),
            (rate("ppserve_cached_prompt_tokens_total"), "prompt, from the prefix cache"),
        ),
    ),
    Panel(
        "Requests, by how they ended",
        ((rate("ppserve_requests_total", "reason") + " > 0", "{{reason}}"),),
        "reqps",
    ),
    Panel(
        "Sequences",
        (
            (f"sum(ppserve_requests_running{{{WHERE}}})", "running"),
            (f"sum(ppserve_requests_waiting{{{WHERE}}})", "waiting"),
            (f"sum(ppserve_microbatches_in_flight{{{WHERE}}})", "microbatches in flight"),
        ),
    ),
    Panel("Draft tokens", ((rate("ppserve_draft_tokens_total", "outcome"), "{{outcome}}"),)),
    Panel("KV cache in use", ((f"max(ppserve_kv_usage_ratio{{{WHERE}}})", "share"),), "percentunit", top=1.0),
    Panel("Time in the queue", quantiles("ppserve_request_queue_seconds"), "s"),
    Panel("Time per output token", quantiles("ppserve_time_per_output_token_seconds"), "s"),
    Panel(
        "Mean step, per stage",
        (
            (
                rate("ppserve_stage_step_seconds_sum", "replica, stage")
                + " / ("
                + rate("ppserve_stage_step_seconds_count", "replica, stage")
                + " > 0)",
                "replica {{replica}}, stage {{stage}}",
            ),
        ),
        "s",
        description="Compute time; the slowest stage sets the pace of all.",
    ),
    Panel(
        "Transfer p99, per sending stage",
        (
            (
                f"histogram_quantile(0.99, {rate('ppserve_transfer_seconds_bucket', 'stage, le')})",
                "from stage {{stage}}",
            ),
        ),
        "s",
    ),
    Panel("Hidden states sent", ((rate("ppserve_transfer_bytes_total", "stage"), "from stage {{stage}}"),), "Bps"),
    Panel(
        "Rows per step",
        (
            (
                rate("ppserve_microbatch_tokens_sum", "phase")
                + " / ("
                + rate("ppserve_microbatch_tokens_count", "phase")
                + " > 0)",
                "{{phase}}",
            ),
        ),
    ),
    Panel(
        "Stages lost and replaced",
        (
            (
                "sum by (replica, stage, cause)"
                f" (increase(ppserve_stage_restarts_total{{{WHERE}}}[$__rate_interval]))",
                "replica {{replica}}, stage {{stage}}, {{cause}}",
            ),
        ),
    ),
    Panel("What runs where", ((f"ppserve_stage_info{{{WHERE}}}", ""),), kind="table"),
)


# A stack of times reaches 100% only for one replica.
ONE = {"multi": False, "includeAll": False, "current": {"text": "0", "value": "0"}}


def dashboard() -> dict[str, Any]:
    """The whole document, as Grafana imports it."""
    panels, x, y, row_height = [], 0, 0, 0
    for number, panel in enumerate(PANELS, 1):
        if x + panel.width > 24:
            x, y, row_height = 0, y + row_height, 0
        place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
        panels.append(_panel(panel, number) | {"gridPos": place})
        x, row_height = x + panel.width, max(row_height, panel.height)
    return {
        "uid": "ppserve",
        "title": "ppserve",
        "description": "Where every second of every pipeline stage goes.",
        "tags": ["ppserve"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus", "hide": 2},
                _variable("instance", "Server", "label_values(ppserve_build_info, instance)"),
                _variable("replica", "Replica", f"label_values(ppserve_kv_usage_ratio{{{WHERE}}}, replica)") | ONE,
                _variable("stage", "Stage", f"label_values(ppserve_stage_idle_seconds_total{{{WHERE}}}, stage)"),
            ]
        },
        "panels": panels,
    }


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 3,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(panel: Panel, number: int) -> dict[str, Any]:
    table = panel.kind == "table"
    targets = [
        {"refId": chr(65 + i), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
        | ({"instant": True, "format": "table"} if table else {})
        for i, (expression, legend) in enumerate(panel.queries)
    ]
    custom: dict[str, Any] = {"fillOpacity": 85 if panel.stacked else 8, "lineWidth": 0 if panel.stacked else 1}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal"}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": custom}
    if panel.top is not None:
        defaults["max"] = panel.top
    made: dict[str, Any] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {
            "defaults": {} if table else defaults,
            "overrides": [
                {
                    "matcher": {"id": "byName", "options": name},
                    "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}],
                }
                for name, colour in panel.colours.items()
            ],
        },
        "options": {} if table else {"tooltip": {"mode": "multi"}, "legend": {"placement": "bottom"}},
    }
    return made | ({"repeat": panel.repeat, "repeatDirection": "v"} if panel.repeat else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    text = json.dumps(dashboard(), indent=1) + "\n"
    if not parser.parse_args().check:
        DASHBOARD.write_text(text)
    elif not DASHBOARD.exists() or DASHBOARD.read_text() != text:
        raise SystemExit(f"{DASHBOARD.name} is out of date: run python tools/make_dashboard.py")


if __name__ == "__main__":
    main()
