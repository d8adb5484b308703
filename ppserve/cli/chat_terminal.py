"""The terminal of `ppserve chat`: a message may have several lines, a paste is one, and answers wrap at words.

While an answer arrives, the keys are read as well: Ctrl-C ends it at once, whatever was typed or pasted before.
What else was typed begins the next message.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.data_structures import Size
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import create_input
from prompt_toolkit.key_binding import KeyBindings, KeyPress, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.utils import get_cwidth
from rich.console import Console
from rich.text import Text

from ppserve.cli.dialogue import THINKING

_QUOTES = '"""'
_ERASE_BELOW = "\x1b[J"
_DIM = ("\x1b[2m", "\x1b[22m")
_JOINERS = "\u200c\u200d"  # of letters, and of the parts of a picture
_MOST_TYPED = 1 << 20  # characters
_REFRESH_S = 0.5


class WordWrap:
    """Wraps a text that arrives in pieces. Each piece is shown at once: a word that grows beyond the line's end is
    erased there and written on the next line."""

    def __init__(self) -> None:
        self.column = 0
        self._word = ""

    def add(self, text: str, width: int) -> str:
        """Return what to write for the next piece, in a terminal of `width` columns. The last column stays
        empty."""
        return "".join(self._place(char, max(2, width - 1)) for char in text)

    def _place(self, char: str, width: int) -> str:
        if char == "\n":
            self.column, self._word = 0, ""
            return char
        if char == "\t" or unicodedata.category(char) == "Zs":
            char = " "
        elif not char.isprintable() and char not in _JOINERS:  # the model must not move the cursor
            char = "�"
        cells = get_cwidth(char)
        written = char
        if self.column + cells > width:
            if char == " ":
                self.column, self._word = 0, ""
                return "\n"
            moved = self._word if get_cwidth(self._word) < self.column else ""
            erased = f"\x1b[{get_cwidth(moved)}D\x1b[K" if moved else ""
            written = f"{erased}\n{moved}{char}"
            self.column, self._word = get_cwidth(moved), moved
        self.column += cells
        # A wide character is a word of its own: East Asian text has no spaces.
        self._word = "" if char == " " or cells > 1 else self._word + char
        return written


class _Output(Vt100_Output):
    """Has room for the line below the prompt without asking the terminal where the cursor is, which some terminals
    do not answer."""

    def get_rows_below_cursor_position(self) -> int:
        return 1


class Terminal:
    """Asks for messages and shows answers, on the terminal that standard input and output are."""

    def __init__(self, history_file: Path, stages_line: Callable[[], str]) -> None:
        """history_file: where messages are kept for the next chat. stages_line: the text to show below everything,
        empty for none; it is asked for again and again."""
        self._console = Console(stderr=True, highlight=False)
        self._input = create_input(sys.stdin)
        self._output = _Output(sys.stdout, _size, term=os.environ.get("TERM"), enable_cpr=False)
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation=lambda *_: ". ",
            key_bindings=_bindings(),
            history=_history(history_file),
            input=self._input,
            output=self._output,
        )
        self._stages_line = stages_line
        self._wrap = WordWrap()
        self._is_thinking = False
        self._typed = ""

    def messages(self) -> Iterator[str]:
        """Yield what the user enters, until Ctrl-D. Ctrl-C begins a message anew."""
        while True:
            typed, self._typed = self._typed, ""
            is_watching = bool(self._stages_line())
            self._session.bottom_toolbar = self._stages_line if is_watching else None
            self._session.refresh_interval = _REFRESH_S if is_watching else 0
            try:
                message = self._session.prompt(default=typed)
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            yield _unquoted(message)

    @contextmanager
    def answering(self) -> Iterator[None]:
        self._wrap = WordWrap()
        self._is_thinking = False
        stop_reads, stop_writes = os.pipe()
        self._output.enable_bracketed_paste()
        self._output.flush()
        with self._input.raw_mode():
            reader = threading.Thread(target=self._read_keys, args=(stop_reads,), name="keys", daemon=True)
            reader.start()
            try:
                yield
            finally:
                os.close(stop_writes)
                reader.join()
                os.close(stop_reads)
                if self._stages_line():
                    self._show(_ERASE_BELOW)
                if self._wrap.column > 0:
                    self._show("\n")
        self._output.disable_bracketed_paste()
        self._output.flush()

    def write(self, text: str) -> None:
        # A blank line tells the answer from the thoughts where a terminal cannot show dim letters.
        gap = "\n" * (1 + (self._wrap.column > 0)) if self._is_thinking else ""
        self._is_thinking = False
        self._write(gap + text)

    def think(self, text: str) -> None:
        if not self._is_thinking:
            text = "\n" * (self._wrap.column > 0) + f"{THINKING} {text.lstrip()}"
        self._is_thinking = True
        self._write(text, *_DIM)

    def _write(self, text: str, begin_style: str = "", end_style: str = "") -> None:
        width = self._output.get_size().columns
        shown = begin_style + self._wrap.add(text, width) + end_style
        if line := self._stages_line():
            below = f"\n{line[: width - 1]}\x1b[A\r"
            if self._wrap.column > 0:
                below += f"\x1b[{self._wrap.column}C"
            shown = _ERASE_BELOW + shown + below
        self._show(shown)

    def note(self, text: str) -> None:
        self._begin_line()
        self._console.print(Text(text, style="dim"))

    def problem(self, text: str) -> None:
        self._begin_line()
        self._console.print(Text(f"error: {text}", style="red"))

    def _begin_line(self) -> None:
        if self._wrap.column:
            self._show("\n")
            self._wrap = WordWrap()

    def _show(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def _read_keys(self, stop: int) -> None:
        """Read keys until the pipe `stop` is closed at its other end. Ctrl-C interrupts the main thread."""
        keyboard = self._input.fileno()
        while True:
            readable, _, _ = select.select([keyboard, stop], [], [])
            if keyboard in readable:
                for press in self._input.read_keys():
                    self._take(press)
                if self._input.closed:
                    return
            elif stop in readable:
                return

    def _take(self, press: KeyPress) -> None:
        if press.key == Keys.ControlC:
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)
        elif press.key == Keys.BracketedPaste:
            self._typed += _lines(press.data)
        elif press.key in (Keys.ControlM, Keys.ControlJ):
            self._typed += "\n"
        elif press.key == Keys.ControlH:
            self._typed = self._typed[:-1]
        elif len(press.data) == 1 and press.data.isprintable():
            self._typed += press.data
        self._typed = self._typed[:_MOST_TYPED]


def _size() -> Size:
    """Return the terminal's size. One that does not tell it is taken for an old one of 24 lines and 80 columns."""
    size = os.get_terminal_size(sys.stdout.fileno())
    return Size(rows=size.lines or 24, columns=size.columns or 80)


def _history(file: Path) -> History:
    """Return the history in a file that this user alone can read; where it cannot be kept, one for this chat."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.touch(mode=0o600)
        return FileHistory(file)
    except OSError:
        return InMemoryHistory()


def _bindings() -> KeyBindings:
    """Enter sends, but within quotes it begins a line, as Alt-Enter does everywhere."""
    bindings = KeyBindings()

    @bindings.add("enter")
    def _enter(event: KeyPressEvent) -> None:
        text = event.current_buffer.text.strip()
        is_open = text.startswith(_QUOTES) and (len(text) < 2 * len(_QUOTES) or not text.endswith(_QUOTES))
        if is_open:
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _alt_enter(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def _unquoted(message: str) -> str:
    text = message.strip()
    if len(text) >= 2 * len(_QUOTES) and text.startswith(_QUOTES) and text.endswith(_QUOTES):
        return text[len(_QUOTES) : -len(_QUOTES)].strip("\n")
    return message


def _lines(pasted: str) -> str:
    return pasted.replace("\r\n", "\n").replace("\r", "\n")
