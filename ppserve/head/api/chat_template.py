"""Chat templates as Hugging Face's tokenizers have them: they make one text of a chat's messages.

A special token that the template writes is that token; one that a caller writes is only text. The text of the
caller is therefore marked where it could be read as a token, and the marks are taken out afterwards.
"""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ppserve.errors import ConfigError, InvalidRequest, Violation
from ppserve.head.api.template_process import parse


class ChatTemplate:
    """A template, and the process that renders it, which starts with the first chat.

    tokens: the texts of special tokens, by their names in templates. A template may name the day
    (`strftime_now`): then the same messages are another prompt tomorrow.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """Raises ValueError for what is no template."""
        parse(source)
        self.source, self.tokens = source, tokens
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    @classmethod
    def read(cls, path: Path, tokens: Mapping[str, str] | None = None) -> ChatTemplate:
        """The template that the operator gives. Raises ConfigError."""
        try:
            return cls(path.read_text("utf-8"), tokens or {})
        except OSError as error:
            raise ConfigError("--chat-template", f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError("--chat-template", f"{path} is not a Jinja template: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        variables: Mapping[str, Any],
        special: Collection[str],
        continues: bool,
    ) -> list[str]:
        """All messages as texts and special tokens in turn. special: the texts of all special tokens. continues:
        it ends inside the last message. Raises InvalidRequest for messages that the template does not take."""
        marks = _Marks(special)
        shown = [{name: marks.put(text, name != "role") for name, text in m.items()} for m in messages]
        # With a space, as transformers has it: a template that strips messages shows itself.
        end = secrets.token_hex(16) + " "
        if continues:
            shown[-1]["content"] += end
        text = self._ask({**_in_all(marks, dict(variables)), **self.tokens, "messages": shown})
        return marks.split(_until(end, text) if continues else text)

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._end()

    def _ask(self, variables: Mapping[str, Any]) -> str:
        """Raises InvalidRequest."""
        line = json.dumps(variables) + "\n"
        with self._lock:
            process = self._process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
                answer = json.loads(process.stdout.readline())
            except (OSError, ValueError):
                self._end()
                answer = {"error": "it takes too long"}
        if "error" in answer:
            raise InvalidRequest([Violation("messages", f"the chat template refuses them: {answer['error']}")])
        return str(answer["text"])

    def _start(self) -> subprocess.Popen[str]:
        # A session of its own: Ctrl-C is for the head, with which it ends.
        command = [sys.executable, "-m", parse.__module__]
        self._process = subprocess.Popen(
            command, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(self.source) + "\n")
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


class _Marks:
    """Marks that keep apart the special tokens of a template and their texts in messages. A mark is a number that
    nobody can guess: it stays whatever a template does with letters and spaces."""

    def __init__(self, special: Collection[str]) -> None:
        texts = sorted((text for text in special if len(text) > 1), key=len, reverse=True)
        self._mark = f"{secrets.randbits(128):039d}"
        self._any = "|".join(map(re.escape, texts)) or r"(?!)"
        self._begun = tuple({text[:length] for text in texts for length in range(1, len(text))})

    def put(self, text: str, is_free: bool = True) -> str:
        """A caller's text, marked within each special token and behind the beginning of one. is_free: False for
        what a template compares, which is checked to be a word."""
        if not is_free:
            return text
        marked = re.sub(f"(?={self._any})(.)", rf"\g<1>{self._mark}", text, flags=re.DOTALL)
        end = len(marked.rstrip())
        return f"{marked[:end]}{self._mark}{marked[end:]}" if marked[:end].endswith(self._begun) else marked

    def split(self, text: str) -> list[str]:
        """Texts without marks, and special tokens, in turn."""
        return [part.replace(self._mark, "") for part in re.split(f"({self._any})", text)]


def _in_all(marks: _Marks, value: Any) -> Any:
    """The same JSON, with marks in all its texts."""
    if isinstance(value, str):
        return marks.put(value)
    if isinstance(value, dict):
        return {name: _in_all(marks, item) for name, item in value.items()}
    return [_in_all(marks, item) for item in value] if isinstance(value, list) else value


def _until(mark: str, text: str) -> str:
    """What stands before the last message's end. Raises InvalidRequest for a template that does not show it."""
    before, found, after = text.rpartition(mark.rstrip())
    if not found:
        raise InvalidRequest([Violation("continue_final_message", "the chat template does not show that message")])
    return before if after.startswith(" ") else before.rstrip()
