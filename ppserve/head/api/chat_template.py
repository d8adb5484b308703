"""Chat templates as Hugging Face's tokenizers have them: they make one text of a chat's messages.

A special token that the template writes is that token; one that a caller writes is text. So callers' text is
marked where it could be read as a token, and the marks are taken out afterwards.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import subprocess
import sys
import weakref
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ppserve.errors import ConfigError, InvalidRequest, Violation
from ppserve.head.api.template_process import parse

MAX_RENDERERS = 4

Messages = Sequence[Mapping[str, str]]


class ChatTemplate:
    """A template, and its rendering processes, each started when all others have a chat.

    tokens: texts of special tokens, by their names in templates. special: all of them. A template may name the day
    (`strftime_now`): then the same messages are another prompt tomorrow.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], special: Collection[str]) -> None:
        """Raises ValueError for what is no template."""
        parse(source)
        self.source = source
        self._tokens = tokens
        self._special = special
        self._threads = ThreadPoolExecutor(MAX_RENDERERS)
        self.words = frozenset(re.findall(r"""(?<=['"])\w+(?=['"])""", source))
        """What stands in quotes: its own roles are among them."""
        self._idle: list[subprocess.Popen[str]] = []
        self._turns = weakref.WeakValueDictionary[str, asyncio.Lock]()

    @classmethod
    def read(cls, path: Path, tokens: Mapping[str, str], special: Collection[str]) -> ChatTemplate:
        """The template that the operator gives. Raises ConfigError."""
        try:
            return cls(path.read_text("utf-8"), tokens, special)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", error)
            raise ConfigError("--chat-template", f"{path} cannot be read as a Jinja template: {why}") from error

    async def render(
        self, caller: str, messages: Messages, variables: Mapping[str, Any], continues: bool = False
    ) -> list[str]:
        """All messages as texts and special tokens in turn. A caller's chats are rendered one by one, so nobody
        takes all renderers. Not to be cancelled: that would end its turn, but not its renderer's work.

        continues: it ends inside the last message. Raises InvalidRequest for messages that the template refuses.
        """
        loop = asyncio.get_running_loop()
        async with self._turns.setdefault(caller, asyncio.Lock()):
            return await loop.run_in_executor(self._threads, self._render, messages, variables, continues)

    def _render(self, messages: Messages, variables: Mapping[str, Any], continues: bool) -> list[str]:
        marks = _Marks(self._special)
        # A role is one of a few words, or of the template's, which compares it.
        shown = [{**marks.put(message), "role": message["role"]} for message in messages]
        # The space shows whether the template strips messages; transformers does the same.
        end = secrets.token_hex(16) + " "
        if continues:
            shown[-1]["content"] += end
        text = self._ask({**marks.put(dict(variables)), **self._tokens, "messages": shown})
        return marks.split(_until(end, text) if continues else text)

    def close(self) -> None:
        """Ends the idle processes; the others end with the head."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in [*self._idle]:
            _end(process)

    def _ask(self, variables: Mapping[str, Any]) -> str:
        try:
            process = self._idle.pop()
        except IndexError:
            process = _start(self.source)
        try:
            assert process.stdout is not None
            print(json.dumps(variables), file=process.stdin, flush=True)
            answer = json.loads(process.stdout.readline())
            self._idle.append(process)
        except (OSError, ValueError):
            _end(process)
            answer = {"error": "it takes too long"}
        if "error" in answer:
            raise InvalidRequest([Violation("messages", f"the chat template refuses them: {answer['error']}")])
        return str(answer["text"])


def _start(source: str) -> subprocess.Popen[str]:
    # A session of its own: Ctrl-C is for the head, with which it ends.
    process = subprocess.Popen(
        [sys.executable, "-m", parse.__module__], text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    print(json.dumps(source), file=process.stdin)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


class _Marks:
    """Marks, unguessable numbers, for special tokens' texts in messages."""

    def __init__(self, special: Collection[str]) -> None:
        texts = sorted((text for text in special if len(text) > 1), key=len, reverse=True)
        self._mark = f"{secrets.randbits(128):039d}"
        self._any = "|".join(map(re.escape, texts)) or r"(?!)"
        self._begun = tuple({text[:length] for text in texts for length in range(1, len(text))})

    def put(self, value: Any) -> Any:
        """A caller's JSON, marked within special tokens and behind their beginnings."""
        if isinstance(value, dict):
            return {name: self.put(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self.put(item) for item in value]
        if not isinstance(value, str):
            return value
        marked = re.sub(f"(?={self._any})(.)", rf"\g<1>{self._mark}", value, flags=re.DOTALL)
        end = len(marked.rstrip())
        return f"{marked[:end]}{self._mark}{marked[end:]}" if marked[:end].endswith(self._begun) else marked

    def split(self, text: str) -> list[str]:
        """Texts without marks, and special tokens, in turn."""
        return [part.replace(self._mark, "") for part in re.split(f"({self._any})", text)]


def _until(mark: str, text: str) -> str:
    """What precedes the last message's end. Raises InvalidRequest if that is missing."""
    before, found, after = text.rpartition(mark.rstrip())
    if not found:
        raise InvalidRequest([Violation("continue_final_message", "the chat template does not show that message")])
    return before if after.startswith(" ") else before.rstrip()
