"""Chat templates as Hugging Face's tokenizers have them: they make one text of a chat's messages.

A template writes its own literals, the model's named tokens and the roles. Where it writes a special token's text
of these, that is the token, as far as its characters can be followed: a few filters, which docs/http.md names,
make text of it. Everything else, and so whatever a caller wrote, is text.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ppserve.errors import ConfigError, InvalidRequest, Violation
from ppserve.head.api.answer_parts.formats import FormatNames, answer_format
from ppserve.head.api.template_process import parse
from ppserve.process.limited import LimitedProcesses, OutOfMemory, OutOfTime
from ppserve.tokenizer import ChatFormat

log = logging.getLogger(__name__)

AUTOMATIC = FormatNames()
MAX_RENDERERS = 4
MAX_REASON = 500
DEVELOPER = "developer"
ROLES = ("system", DEVELOPER, "user", "assistant", "tool", "function")

Messages = Sequence[Mapping[str, Any]]
"""Each has one of the template's `roles`. A `content` is a text, or a list of `{"type": "text", "text": ...}`."""


def read_chat_template(
    path: Path | None, own: ChatFormat, special: Mapping[str, int], formats: FormatNames = AUTOMATIC
) -> ChatTemplate | None:
    """Return the template in this file, else the model's own, else None.

    special: the ids of all special tokens, by their texts. Raises ConfigError for a file that holds no template.
    """
    if path is not None:
        return ChatTemplate.read(path, own.tokens, special, formats)
    try:
        return None if own.template is None else ChatTemplate(own.template, own.tokens, special, formats)
    except ValueError as error:
        log.warning("no chats: the model's own chat template cannot be used: %s; see --chat-template", error)
        return None


class ChatTemplate:
    """A template, and its rendering processes. One starts when a chat comes and all others are at work.

    tokens: texts of special tokens, by their names in templates. special: the ids of all special tokens, by their
    texts. A template may name the day (`strftime_now`): then the same messages are another prompt tomorrow.
    """

    def __init__(
        self, source: str, tokens: Mapping[str, str], special: Mapping[str, int], formats: FormatNames = AUTOMATIC
    ) -> None:
        """Raise ValueError for a source that is no template."""
        parse(source)
        self.source = source
        self.answers = answer_format(source, special, formats)
        """How the model writes its answers, as far as the template shows it."""
        begin = json.dumps([source, [*special], {**tokens}])
        self._processes = LimitedProcesses(parse.__module__, begin)
        self._threads = ThreadPoolExecutor(MAX_RENDERERS)
        self.quoted = {*re.findall(r"""(?<=['"])\w+(?=['"])""", source)}
        """All words in quotes. The roles that the template knows are among these."""
        self.roles = {*ROLES, *self.quoted}
        """The roles that messages may have: OpenAI's, and the template's own."""
        self._turns = weakref.WeakValueDictionary[str, asyncio.Lock]()

    @classmethod
    def read(
        cls, path: Path, tokens: Mapping[str, str], special: Mapping[str, int], formats: FormatNames = AUTOMATIC
    ) -> ChatTemplate:
        """Read the template that the operator gives. Raises ConfigError."""
        try:
            if not (source := path.read_text("utf-8")).strip():
                raise ValueError("it is empty")
            return cls(source, tokens, special, formats)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", error)
            raise ConfigError("--chat-template", f"{path} cannot be read as a Jinja template: {why}") from error

    def render_at_once(self, messages: Messages, variables: Mapping[str, Any]) -> list[str]:
        """Return what `render` returns, and block meanwhile."""
        return self._render(messages, variables, continues=False)

    async def render(
        self, caller: str, messages: Messages, variables: Mapping[str, Any], continues: bool = False
    ) -> list[str]:
        """Return all messages as texts and special tokens in turn.

        A caller's chats are rendered one by one, so nobody takes all renderers. Do not cancel this: that would end
        the caller's turn, but not the renderer's work.
        continues: whether the result ends inside the last message.
        Raises InvalidRequest for messages that the template refuses.
        """
        loop = asyncio.get_running_loop()
        async with self._turns.setdefault(caller, asyncio.Lock()):
            return await loop.run_in_executor(self._threads, self._render, messages, variables, continues)

    def _render(self, messages: Messages, variables: Mapping[str, Any], continues: bool) -> list[str]:
        # The space shows whether the template strips messages; transformers does the same.
        end = secrets.token_hex(16) + " "
        if continues:
            *earlier, last = messages
            messages = [*earlier, {**last, "content": _extended(last["content"], end)}]
        parts = self._ask({"tools": None, "documents": None, **variables, "messages": messages})
        return _until(end, parts) if continues else parts

    def close(self) -> None:
        """End the idle processes; the others end with the head."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._processes.close()

    def _ask(self, variables: Mapping[str, Any]) -> list[str]:
        try:
            answer = json.loads(self._processes.ask(json.dumps(variables)))
        except (OutOfTime, OutOfMemory):
            answer = {"error": "it takes too long"}
        if "error" in answer:
            start = answer["error"][:MAX_REASON]
            why = "".join(char if char.isprintable() else " " for char in start)
            raise InvalidRequest([Violation("messages", f"the chat template refuses them: {why}")])
        return [*map(str, answer["parts"])]


def _extended(content: Any, end: str) -> Any:
    """Return `content` with `end` behind its last text."""
    if isinstance(content, str):
        return content + end
    *earlier, last = content
    return [*earlier, {**last, "text": last["text"] + end}]


def _until(mark: str, parts: Sequence[str]) -> list[str]:
    """Return the parts that precede the last message's end. Raises InvalidRequest if that is missing."""
    for place in range(len(parts) - 1, -1, -2):
        before, found, after = parts[place].rpartition(mark.rstrip())
        if found:
            return [*parts[:place], before if after.startswith(" ") else before.rstrip()]
    raise InvalidRequest([Violation("continue_final_message", "the chat template does not show that message")])
