"""The line that says how something goes on: it moves on a terminal, and is repeated rarely elsewhere."""

from __future__ import annotations

import io

from ppserve.process.progress import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_one_line_moves() -> None:
    line = ProgressLine(terminal := Terminal(), "starting", now_s=1.0)
    line.show("loading 1 GiB of 2 GiB", now_s=1.5)
    line.show("joining", now_s=4.0)
    line.erase()
    moves = ["starting, 0 s: loading 1 GiB of 2 GiB\r", "starting, 3 s: joining\r", ""]
    assert terminal.getvalue() == "".join(f"\r\x1b[K{text}" for text in moves)


def lines(texts: dict[float, str]) -> list[str]:
    """Return what is written elsewhere of these texts, which are shown at these seconds."""
    line = ProgressLine(file := io.StringIO(), "starting", now_s=0.0)
    for now_s, text in texts.items():
        line.show(text, now_s)
    line.erase()
    return file.getvalue().splitlines()


def test_elsewhere_what_takes_two_seconds_is_said_once() -> None:
    assert lines({0.5: "importing", 1.9: "importing"}) == []
    assert lines(dict.fromkeys((1.0, 2.0, 3.0, 60.0), "importing")) == ["starting, 2 s: importing"]


def test_elsewhere_a_count_that_grows_fills_no_log() -> None:
    told = lines({float(second): f"loading {second} GB of 600 GB" for second in range(600)})
    seconds = [*range(2, 30, 2), *range(38, 600, 10)]
    assert told == [f"starting, {second} s: loading {second} GB of 600 GB" for second in seconds]


def test_lines_may_go_to_the_log_and_then_none_moves() -> None:
    said: list[str] = []
    line = ProgressLine(terminal := Terminal(), "starting", now_s=0.0, say=said.append)
    line.show("importing", now_s=3.0)
    line.erase()
    assert said == ["starting, 3 s: importing"]
    assert terminal.getvalue() == ""
