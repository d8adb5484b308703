"""The tour's pictures, as PNG files. matplotlib is needed only when they are asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tour.errors import TourError
from tour.gain import Gain
from tour.schedule import Schedule
from tour.server import WatchedStream

_WIDE = (9.0, 4.5)
_STRETCH_US = 40_000
_COLOURS = ("#2f6f9f", "#d98c2b", "#4f9a5b", "#b04a4a", "#7a62a8", "#8a6d4f", "#5a8f8f", "#999999")
_KINDS = {"compute": "#2f6f9f", "fill_drain": "#d9d3c7", "imbalance": "#e0a35a", "transfer": "#c4574f"}
_KINDS |= {"token_return": "#8fb59a", "host": "#9c8bbd"}


def _schedule_title(schedule: Schedule, first: Schedule) -> str:
    what = f"{schedule.m} {'microbatch' if schedule.m == 1 else 'microbatches'}: {schedule.wall / 1e6:.0f} ms"
    return what if schedule is first else f"{what}, {schedule.wall / first.wall:.0%} of the time of one"


class Pictures:
    """Draws pictures into one directory. Raises TourError at once if matplotlib is missing, or if the directory
    cannot be written to."""

    def __init__(self, directory: Path) -> None:
        try:
            import matplotlib
        except ImportError:
            raise TourError("--plot needs matplotlib: pip install matplotlib") from None
        matplotlib.use("agg")
        self._directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            trial = directory / ".writable"
            trial.touch()
            trial.unlink()
        except OSError as error:
            raise TourError(f"--plot: cannot write to {directory}: {error.strerror}") from error

    def schedules(self, schedules: Sequence[Schedule]) -> Path:
        """Draw one panel per number of microbatches, with a row of boxes per stage, all on the same scale."""
        height = 1 + 0.35 * len(schedules) * (schedules[0].num_stages + 1)
        figure, panels = self._figure(len(schedules), (9.0, height))
        for panel, schedule in zip(panels, schedules, strict=True):
            for stage, spans in enumerate(schedule.spans):
                for k, (begun, ended) in enumerate(spans):
                    panel.barh(stage, (ended - begun) / 1e6, left=begun / 1e6, height=0.85, color=_COLOURS[k % 8])
                    panel.text((begun + ended) / 2e6, stage, str(k), color="white", ha="center", va="center")
            panel.set_yticks(range(schedule.num_stages), [f"stage {s}" for s in range(schedule.num_stages)])
            panel.invert_yaxis()
            panel.set_title(_schedule_title(schedule, schedules[0]), loc="left", fontsize=10)
            panel.set_facecolor("#eeeae2")
            panel.set_xlim(0, max(s.wall for s in schedules) / 1e6)
        panels[-1].set_xlabel("milliseconds")
        return self._save(figure, "schedule.png")

    def memory(self, models: dict[str, list[float]], stages: Sequence[int]) -> Path:
        """Draw the GiB of the fullest stage, for each model and number of stages."""
        figure, [panel] = self._figure(1, _WIDE)
        width = 0.8 / len(stages)
        for i, p in enumerate(stages):
            places = [m + (i - (len(stages) - 1) / 2) * width for m in range(len(models))]
            bars = panel.bar(places, [needs[i] for needs in models.values()], width, color=_COLOURS[i])
            bars.set_label(f"{p} stage" if p == 1 else f"{p} stages")
            panel.bar_label(bars, fmt="%.1f", fontsize=8)
        panel.set_xticks(range(len(models)), list(models))
        panel.set_yscale("log")
        panel.set_yticks((1, 3, 10, 30), ("1", "3", "10", "30"))
        panel.minorticks_off()
        panel.set_ylabel("GiB on the fullest stage")
        name, needs_gib = list(models.items())[-1]
        alone, most = needs_gib[0], needs_gib[-1]
        message = f"{name} needs {alone:.0f} GiB on one device, and at most {most:.1f} on each of {stages[-1]}"
        panel.set_title(f"{message} (bfloat16, 32 x 1,024 tokens)", loc="left", fontsize=10)
        panel.legend(frameon=False)
        return self._save(figure, "memory.png")

    def efficiency(self, schedules: Sequence[Schedule], in_flight: dict[int, float]) -> Path:
        """Draw the bubble by m, ideal and measured, and the tokens per second by microbatches in flight."""
        figure, [left, right] = self._figure(2, _WIDE, side_by_side=True)
        m = [schedule.m for schedule in schedules]
        left.plot(m, [100 * s.ideal_bubble for s in schedules], "o--", color=_COLOURS[7], label="(p-1)/(m+p-1)")
        left.plot(m, [100 * s.bubble for s in schedules], "o-", color=_COLOURS[0], label="measured")
        left.set_xscale("log", base=2)
        left.set_xticks(m, [str(n) for n in m])
        left.set_xlabel("microbatches")
        left.set_ylabel("bubble, % of all stages' time")
        left.set_ylim(0)
        waits = f"{schedules[0].bubble:.0%} with one microbatch, {schedules[-1].bubble:.0%} with {m[-1]}"
        left.set_title(f"Stages stand still: {waits}", loc="left", fontsize=10)
        left.legend(frameon=False)
        right.bar([str(n) for n in in_flight], list(in_flight.values()), color=_COLOURS[1])
        right.set_xlabel("sequences in flight")
        right.set_ylabel("tokens/s")
        p = schedules[0].num_stages
        message = f"{p} sequences on {p} stages: {in_flight[p] / in_flight[1]:.1f} times the tokens of one"
        right.set_title(message, loc="left", fontsize=10)
        return self._save(figure, "efficiency.png")

    def timeline(self, streams: dict[str, WatchedStream], trace: Path) -> Path:
        """Draw when tokens arrived, undisturbed and with a stage killed, and a part of the schedule."""
        figure, [top, bottom] = self._figure(2, (9.0, 6.0))
        for (label, stream), colour in zip(streams.items(), (_COLOURS[7], _COLOURS[3]), strict=True):
            top.plot(stream.arrivals, range(1, len(stream.arrivals) + 1), ".-", ms=3, color=colour, label=label)
        pause = max(stream.longest_pause for stream in streams.values())
        top.set_title(f"A killed stage costs a pause of {pause:.1f} s, and no token", loc="left", fontsize=10)
        top.set_xlabel("seconds since the request")
        top.set_ylabel("tokens received")
        top.legend(frameon=False)
        events = [e for e in read_trace(trace) if e.get("ph") == "X"]
        # The middle one of all steps belongs to the streams that ran together.
        steps = [event for event in events if event["name"][0].isdigit()]
        if steps:
            begun_us = steps[len(steps) // 2]["ts"]
            self._draw_stretch(bottom, events, begun_us, begun_us + _STRETCH_US)
            bottom.set_title("With several streams the stages take turns at them", loc="left", fontsize=10)
        return self._save(figure, "timeline.png")

    def callers(self, gains: Sequence[Gain], num_stages: int) -> Path:
        """Draw the tokens per second from one stage and from several, by the number of callers."""
        figure, [panel] = self._figure(1, _WIDE)
        places = range(len(gains))
        one = panel.bar([at - 0.2 for at in places], [gain.of_one for gain in gains], 0.4, color=_COLOURS[7])
        every = panel.bar([at + 0.2 for at in places], [gain.of_all for gain in gains], 0.4, color=_COLOURS[0])
        one.set_label("1 stage")
        every.set_label(f"{num_stages} stages")
        panel.bar_label(every, [f"{gain.ratio:.2f} x" for gain in gains])
        panel.set_xticks(places, [str(gain.callers) for gain in gains])
        panel.set_xlabel("callers")
        panel.set_ylabel("tokens/s")
        times = ", ".join(f"{gain.ratio:.1f} for {gain.callers}" for gain in gains)
        message = f"{num_stages} stages beside one: times the tokens, {times} callers"
        panel.set_title(message, loc="left", fontsize=10)
        panel.legend(frameon=False)
        return self._save(figure, "callers.png")

    def _draw_stretch(self, panel: Any, events: list[dict[str, Any]], start_us: float, end_us: float) -> None:
        labelled = set()
        for event in events:
            kind = event["name"] if event["name"] in _KINDS else "compute"
            begun, ended = max(event["ts"], start_us), min(event["ts"] + event["dur"], end_us)
            if begun < ended:
                bar = panel.barh(event["pid"], (ended - begun) / 1e3, left=(begun - start_us) / 1e3, height=0.8)
                bar[0].set_color(_KINDS[kind])
                if kind not in labelled:
                    bar.set_label(kind)
                    labelled.add(kind)
        stages = sorted({event["pid"] for event in events})
        panel.set_yticks(stages, [f"stage {s}" for s in stages])
        panel.invert_yaxis()
        panel.set_xlabel("milliseconds")
        panel.set_xlim(0, (end_us - start_us) / 1e3)
        panel.legend(frameon=False, ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.25))

    def _figure(self, panels: int, size: tuple[float, float], side_by_side: bool = False) -> tuple[Any, list[Any]]:
        from matplotlib import pyplot

        rows, columns = (1, panels) if side_by_side else (panels, 1)
        figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
        for panel in axes.flat:
            panel.spines[["top", "right"]].set_visible(False)
        return figure, list(axes.flat)

    def _save(self, figure: Any, name: str) -> Path:
        from matplotlib import pyplot

        figure.savefig(self._directory / name, dpi=130)
        pyplot.close(figure)
        return self._directory / name


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events of a server's `--trace` file, whose closing bracket may be missing."""
    text = path.read_text().rstrip().rstrip(",").removesuffix("]").rstrip().rstrip(",")
    events: list[dict[str, Any]] = json.loads(text + "]") if text else []
    return events
