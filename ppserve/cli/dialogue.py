"""The conversation of `ppserve chat`: its messages and settings, and one answer from its question to its end."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, Protocol

from ppserve.cli.chat_server import ChatServer, Lost, NewText, ReceivedAnswer
from ppserve.errors import PpserveError

THINKING = "[thinking]"
"""What screens show before the model's thoughts."""

_PAUSE_S = 0.5


class Screen(Protocol):
    """Where a conversation is shown."""

    def answering(self) -> AbstractContextManager[None]:
        """Return a block in which an answer is shown. It ends the answer's last line."""

    def write(self, text: str) -> None:
        """Show the next text of the answer."""

    def think(self, text: str) -> None:
        """Show the next text of what the model thinks before it answers; an empty text: that it thinks."""

    def note(self, text: str) -> None:
        """Show what is no part of the answer, on lines of its own."""

    def problem(self, text: str) -> None:
        """Show what went wrong."""


class Interrupts:
    """Lets Ctrl-C raise KeyboardInterrupt while an answer is read, and only then."""

    def __init__(self) -> None:
        self._is_armed = False

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Take the signal, until the block's end. Without `arm` it does nothing."""
        before = signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield
        finally:
            self.disarm()
            signal.signal(signal.SIGINT, before)

    def arm(self) -> None:
        self._is_armed = True

    def disarm(self) -> None:
        self._is_armed = False

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_armed:
            self._is_armed = False
            raise KeyboardInterrupt


class Dialogue:
    """The messages so far, and the settings that are sent with them."""

    def __init__(self, server: ChatServer, screen: Screen, retry_s: float) -> None:
        """retry_s: for how many seconds to try again while no server answers."""
        self._server, self._screen, self._retry_s = server, screen, retry_s
        self._interrupts = Interrupts()
        self.settings: dict[str, Any] = {}
        self.system: str | None = None
        self.shows_timings = False
        self.shows_thoughts = True
        self.history: list[dict[str, Any]] = []
        """Questions and answers in turn."""

    def ask(self, text: str) -> bool:
        """Show the answer as it arrives, up to a Ctrl-C. Return whether it ended without an error."""
        return self._ask(text, self.history)

    def ask_again(self) -> bool:
        """Ask the last question again, and put the answer in place of the one before. Where the server refuses, or
        nothing came up to a Ctrl-C, the answer before stays. Return whether the new answer took its place. Raise
        PpserveError if there is no question."""
        if not self.history:
            raise PpserveError("there is no question to ask again")
        *earlier, question, _ = self.history
        before = self.history
        self._ask(question["content"], earlier)
        return self.history is not before

    def _ask(self, text: str, earlier: list[dict[str, Any]]) -> bool:
        """Ask behind the messages `earlier`. They, the question and its answer become the history, unless nothing
        was answered."""
        question = {"role": "user", "content": text}
        answer = ReceivedAnswer(self._body([*earlier, question]))
        begun_s = time.monotonic()
        first_s: float | None = None
        problem: str | None = None
        was_stopped = False
        with self._interrupts.caught():
            with self._screen.answering():
                try:
                    self._interrupts.arm()
                    for new in self._texts(answer):
                        if first_s is None:
                            first_s = time.monotonic() - begun_s
                        self._show(new)
                    self._interrupts.disarm()
                except KeyboardInterrupt:
                    was_stopped = True
                except PpserveError as error:
                    self._interrupts.disarm()
                    problem = str(error)
            if problem is not None:
                self._screen.problem(problem)
            self._explain_end(answer, was_stopped)
            if answer.is_empty and not answer.is_complete:
                return problem is None
            self.history = [*earlier, question, answer.message()]
            if self.shows_timings:
                self._show_timings(answer.num_tokens, first_s or 0.0, time.monotonic() - begun_s)
        return problem is None

    def body(self) -> dict[str, Any]:
        """Return the settings and all messages, as the body of a request."""
        return self._body(self.history)

    def _body(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        settings = dict(self.settings)
        if (thinking := settings.pop("thinking", None)) is not None:
            settings["chat_template_kwargs"] = {"enable_thinking": thinking == "on"}
        instructions = [{"role": "system", "content": self.system}] if self.system else []
        return {**settings, "messages": [*instructions, *messages]}

    def _show(self, new: NewText) -> None:
        if new.thought:
            self._screen.think(new.thought if self.shows_thoughts else "")
        if new.said:
            self._screen.write(new.said)

    def take_back(self) -> str | None:
        """Forget the last question with its answer, and return the question; None where there is none."""
        if not self.history:
            return None
        question: str = self.history[-2]["content"]
        del self.history[-2:]
        return question

    def _explain_end(self, answer: ReceivedAnswer, was_stopped: bool) -> None:
        """Say what the model calls, and why an answer ends before the model ended it."""
        for call in answer.calls:
            self._screen.note(f"[the model calls {call['function']['name']}({call['function']['arguments']})]")
        if was_stopped:
            self._screen.note("[broken off here by Ctrl-C]")
        elif answer.finish_reason == "length":
            most = self.settings.get("max_tokens")
            is_full = most is None or answer.num_tokens < most
            why = "the context is full; /reset begins anew" if is_full else "/set max_tokens N allows more"
            self._screen.note(f"[broken off here after {answer.num_tokens} tokens: {why}]")

    def _texts(self, answer: ReceivedAnswer) -> Iterator[NewText]:
        """Yield the answer's texts up to its end. While the server cannot be reached, the request is repeated."""
        until_s: float | None = None
        while not answer.is_complete:
            try:
                for new in self._server.texts(answer):
                    if new.thought or new.said:
                        until_s = None
                        yield new
                if not answer.is_complete:
                    raise Lost("the stream ended too early")
            except Lost as error:
                if answer.is_complete:
                    break
                if not answer.is_empty and not answer.ids:
                    raise PpserveError(f"the answer broke off: {error}") from None
                if until_s is None:
                    until_s = time.monotonic() + self._retry_s
                    self._screen.note(f"[the server is away ({error}): trying for {self._retry_s:g} s]")
                if time.monotonic() >= until_s:
                    raise PpserveError(f"no answer: {error}") from None
                time.sleep(_PAUSE_S)

    def _show_timings(self, num_tokens: int, first_s: float, took_s: float) -> None:
        rate = max(0, num_tokens - 1) / max(took_s - first_s, 1e-9)
        in_all = f"{num_tokens} tokens in {took_s:.2f} s"
        self._screen.note(f"[{in_all}; the first after {first_s:.2f} s, then {rate:.1f} a second]")
