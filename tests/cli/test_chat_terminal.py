"""`ppserve chat` on a terminal: pastes, several lines, Ctrl-C, wrapping, commands."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from ppserve.cli.chat_stages import render_stages
from ppserve.cli.chat_terminal import WordWrap
from tests.cli.test_chat import SHORT, answering, command, event, say, saying, thought

_WITHIN_S = 30.0
_MOVES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class OnTerminal:
    """A chat on a terminal of its own. `shown` is what it wrote since the last text that was waited for,
    `all` what it wrote since it began, with the terminal's codes."""

    def __init__(self, url: str, home: Path, columns: int) -> None:
        self._terminal, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        environment = {**os.environ, "TERM": "xterm", "XDG_CACHE_HOME": str(home)}
        self.process = subprocess.Popen(
            command(url), stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        self.shown = self.all = ""

    def until(self, text: str) -> str:
        """Read up to this text, and return what was written before it."""
        deadline_s = time.monotonic() + _WITHIN_S
        while text not in (plain := _MOVES.sub("", self.shown)):
            if not select.select([self._terminal], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                raise AssertionError(f"no {text!r} in {self.shown!r}")
            written = os.read(self._terminal, 65536).decode()
            self.shown += written
            self.all += written
        before, _, self.shown = plain.partition(text)
        return before

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)


@contextmanager
def chatting(url: str, home: Path, columns: int = 80) -> Iterator[OnTerminal]:
    chat = OnTerminal(url, home, columns)
    try:
        chat.until("commands")
        chat.until(">")
        yield chat
    finally:
        chat.close()


def paste(text: str) -> str:
    return f"\x1b[200~{text}\x1b[201~"


def contents(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"]]


def test_a_paste_is_one_message_and_so_are_lines_by_alt_enter_and_within_quotes(tmp_path: Path) -> None:
    with answering(SHORT, SHORT, SHORT) as (url, bodies), chatting(url, tmp_path) as chat:
        for keys in (paste("one\ntwo\r\n\nthree"), "four\x1b\rfive", '"""six\rseven"""'):
            chat.type(keys + "\r")
            chat.until("end")
            chat.until(">")
        chat.type("\x04")
        assert chat.process.wait(_WITHIN_S) == 0
    assert [contents(body)[-1] for body in bodies] == ["one\ntwo\n\nthree", "four\nfive", "six\nseven"]
    kept = (tmp_path / "ppserve/chat-history").stat()
    assert kept.st_mode & 0o777 == 0o600


def endless(handler: BaseHTTPRequestHandler, _body: dict[str, Any]) -> None:
    say(handler, event("and so", [1]))
    try:
        while True:
            handler.wfile.write(event(" on", [2]))
            time.sleep(0.001)
    except OSError:
        pass


def test_ctrl_c_ends_a_flood_at_once_and_what_was_pasted_meanwhile_is_the_next_message(tmp_path: Path) -> None:
    pasted = "\n".join(f"line {number} of what is pasted" for number in range(280))
    assert len(pasted) > 7000
    as_sent = pasted.replace("\n", "\r", 200).replace("\n", "\r\n", 40)  # as terminals do, and other systems
    with answering(endless, SHORT) as (url, bodies), chatting(url, tmp_path) as chat:
        chat.type("go\r")
        chat.until("and so on")
        writing = threading.Thread(target=chat.type, args=(paste(as_sent) + "\x03",))
        writing.start()
        chat.until("[broken off here by Ctrl-C]")
        writing.join()
        chat.until("line 279 of what is pasted")
        chat.type("\r")
        chat.until("end")
    assert contents(bodies[1])[0] == "go"
    assert contents(bodies[1])[1].startswith("and so on")
    assert contents(bodies[1])[2] == pasted


def test_ctrl_c_at_the_prompt_begins_the_message_anew(tmp_path: Path) -> None:
    with answering(SHORT) as (url, bodies), chatting(url, tmp_path) as chat:
        chat.type("never mind")
        chat.until("never mind")
        chat.type("\x03")
        chat.until("> never mind")  # the old prompt is drawn once more, before the new one
        chat.until(">")
        chat.type("no, this")
        chat.until("no, this")
        chat.process.send_signal(signal.SIGINT)
        chat.until("> no, this")
        chat.until(">")
        chat.type("now\r")
        chat.until("end")
    assert contents(bodies[0]) == ["now"]


def drawn(written: str) -> list[str]:
    """The lines that a terminal shows: of its codes, those that move left and that erase to the line's end."""
    lines, column = [""], 0
    for code, count, char in re.findall(r"(\x1b\[(\d*)[DK])|([^\x1b])", written):
        if code:
            column -= int(count) if code.endswith("D") else 0
            lines[-1] = lines[-1][:column]
        elif char == "\n":
            lines.append("")
            column = 0
        else:
            lines[-1] += char
            column += 1
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_an_answer_wraps_at_words_whatever_its_pieces(size: int) -> None:
    text = "A story of a fox that ran away\nand an extraordinarilylongishword, then   more. "
    text += "\x1b[2J日本語日本語日本語"
    wrap = WordWrap()
    written = "".join(wrap.add(text[at : at + size], 16) for at in range(0, len(text), size))
    assert drawn(written) == [
        *("A story of a", "fox that ran", "away", "and an", "extraordinarily", "longishword,", "then   more."),
        *("�[2J日本語日本", "語日本語"),
    ]


def test_a_terminal_shows_whole_words(tmp_path: Path) -> None:
    pieces = [event(piece, [1]) for piece in ("one two thr", "ee four fi", "ve six sev", "en eight")]
    with answering(saying(*pieces, event("", [2], "length"))) as (url, _), chatting(url, tmp_path, 22) as chat:
        chat.type("count\r")
        chat.until("one two three four fi")
        assert chat.until("[broken off here").split() == ["five", "six", "seven", "eight"]


def test_thoughts_are_dim_and_a_blank_line_from_the_answer(tmp_path: Path) -> None:
    thinks = [thought(piece) for piece in ("\nSo many", " words to", " think")]
    answer = saying(*thinks, event("An ", [1]), event("answer.", [2], "stop"))
    with answering(answer, answer) as (url, _), chatting(url, tmp_path, 22) as chat:
        chat.type("hello\r")
        chat.until("answer.")
        shown = chat.all
        for hidden in ("/thinking\r", "hello\r"):
            chat.until(">")
            chat.type(hidden)
        assert "many" not in chat.until("answer.")
    _, begin, rest = shown.partition("\x1b[2m[thinking]")
    assert begin
    *pieces, last = rest.split("\x1b[22m")
    assert all("answer" not in piece for piece in pieces)
    assert drawn("[thinking]" + "".join(pieces).replace("\x1b[2m", "").replace("\r", "")) == [
        "[thinking] So many", "words to think",
    ]  # fmt: skip
    assert last.replace("\r", "").startswith("\n\nAn answer.")


COMMANDS: list[tuple[str, str]] = [
    ("/help", "Ask the last question again."),
    ("/frobnicate", "there is no command /frobnicate"),
    ("/rety", "did you mean /retry?"),
    ("/sys", "did you mean /system?"),
    ("/settings", "there is no command /settings; /help lists them"),
    ("/stop", "there is no command /stop; /help lists them"),
    ("/reset now", "/reset takes nothing after it"),
    ("/system Be brief.", "the system message is now: Be brief."),
    ("/set temperature 9e9", "temperature: "),
    ("/set temperature 0.5", "temperature is now 0.5"),
    ("/set colour red", "/set NAME VALUE, where NAME is one of"),
    ("/show", "1 question so far"),
    ("/retry", "takes the place of the one before"),
    ("/save", "/save FILE needs the name of a file"),
    ("/save {home}/it.json", "3 messages written to"),
    ("/save {home}/it.json", "File exists"),
    ("/undo", "forgotten, with its answer: hello"),
    ("/undo", "there is nothing to undo"),
    ("/thinking", "what the model thinks is not shown any more"),
    ("/set thinking off", "thinking is now off"),
    ("/set thinking", "thinking is now the server's default"),
    ("/stages", "does not tell what its stages do"),
    ("/system", "there is no system message now"),
    ("/reset", "0 questions forgotten"),
]


def test_each_command_says_what_it_did(tmp_path: Path) -> None:
    with answering(SHORT, SHORT, SHORT) as (url, bodies), chatting(url, tmp_path, 200) as chat:
        for line, said in [("hello", "end"), *COMMANDS, ("//bin", "end")]:
            chat.type(line.format(home=tmp_path) + "\r")
            chat.until(said)
            chat.until(">")
        chat.type("/quit\r")
        assert chat.process.wait(_WITHIN_S) == 0
    assert [contents(body) for body in bodies] == [["hello"], ["Be brief.", "hello"], ["/bin"]]
    assert (bodies[0]["temperature"], bodies[1]["temperature"]) == (0.7, 0.5)
    saved = json.loads((tmp_path / "it.json").read_text())
    assert [message["role"] for message in saved["messages"]] == ["system", "user", "assistant"]


def test_the_last_line_shows_what_the_server_says_of_its_stages(tmp_path: Path) -> None:
    seconds = itertools.count(1)

    def state() -> bytes:
        spent_s = next(seconds)
        time_s = {"decode": 2 * spent_s, "host": spent_s, "idle": spent_s}
        stages = [{"replica": 0, "stage": number, "time_s": time_s} for number in range(2)]
        return json.dumps({"stages": stages}).encode()

    with answering(SHORT, pages={"/state.json": state}) as (url, _), chatting(url, tmp_path) as chat:
        chat.type("/stages\r")
        chat.until("the last line shows what the stages do")
        chat.until("stage 0.1 ██░░░  50% host")
        chat.type("hello\r")
        chat.until("end")
        chat.until(">")
        chat.type("/stages\r")
        chat.until("the stages are not shown any more")


def test_the_stages_line_tells_the_time_between_two_readings() -> None:
    before = {"0.0": {"decode": 1.0, "host": 1.0, "idle": 5.0}}
    now = {"0.0": {"decode": 1.25, "host": 1.0, "idle": 5.25}}
    assert render_stages(before, now, 80) == "stage 0.0 █████░░░░░  50% busy, else idle"


@pytest.mark.parametrize("width", [200, 99, 79, 59, 45])
def test_the_stages_line_names_what_each_of_two_stages_waits_for_in_any_usual_width(width: int) -> None:
    line = render_stages({}, {f"0.{stage}": {"decode": 1.0, "token_return": 3.0} for stage in range(2)}, width)
    assert line.count("25%") == line.count("token_return") == 2
    assert len(line) <= width
