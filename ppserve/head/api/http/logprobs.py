"""Log-probabilities as the two interfaces show them: lists per sequence (completions), lists of tokens (chats)."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from ctypes import c_float
from typing import Any

from ppserve.core.plan import TokenLogprobs
from ppserve.head.api.stream import Score

# JSON has no infinity; vLLM's value.
_MIN_LOGPROB = -9999.0
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

ScoredToken = tuple[int, Score]
BytesOf = Callable[[int], bytes]


class LogprobWriter:
    """Writes the log-probabilities of one sequence, from its first token on.

    as_ids: tokens are named `token_id:N` (vLLM's `return_tokens_as_token_ids`).
    """

    def __init__(self, token_bytes: BytesOf, text_bytes: BytesOf, as_ids: bool) -> None:
        self._token_bytes = token_bytes
        self._text_bytes = text_bytes
        self._as_ids = as_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def completion(self, prompt: Iterable[ScoredToken], generated: Iterable[ScoredToken]) -> dict[str, list[Any]]:
        """The sequence's next tokens, an entry for each in every list. prompt: those of the prompt where they are
        asked for and come first; the first of them has no log-probability. `text_offset` counts the characters
        before a token. Prompt and answer are decoded apart: a character is not completed across them."""
        lists: dict[str, list[Any]] = {name: [] for name in _LISTS}
        self._add(lists, prompt)
        self._offset += len(self._decoder.decode(b"", final=True)) if lists["tokens"] else 0
        self._add(lists, generated)
        return lists

    def _add(self, lists: dict[str, list[Any]], scored: Iterable[ScoredToken]) -> None:
        for token_id, score in scored:
            name = self._name(token_id)
            logprob = None if score is None else _finite(score.logprob)
            top = None if score is None else self._top(name, score)
            for list_name, value in zip(_LISTS, (name, logprob, top, self._offset), strict=True):
                lists[list_name].append(value)
            self._offset += len(self._decoder.decode(self._text_bytes(token_id)))

    def _top(self, name: str, score: TokenLogprobs) -> dict[str, float]:
        """The likeliest come first: where two tokens have one name, the first of them keeps it."""
        top: dict[str, float] = {}
        for token_id, logprob in score.top:
            top.setdefault(self._name(token_id), _finite(logprob))
        top.setdefault(name, _finite(score.logprob))
        return top

    def chat(self, scored: Iterable[ScoredToken]) -> dict[str, list[Any]]:
        """The sequence's next tokens, as chats show them."""
        entries = []
        for token_id, score in scored:
            assert score is not None, "only the first token of a prompt has no score"
            top = [self._entry(top_id, top_logprob) for top_id, top_logprob in score.top]
            entries.append({**self._entry(token_id, score.logprob), "top_logprobs": top})
        return {"content": entries}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        content = list(self._token_bytes(token_id))
        return {"token": self._name(token_id), "logprob": _finite(logprob), "bytes": content}

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else token_name(self._token_bytes(token_id))


def token_name(content: bytes) -> str:
    r"""A token as text; one that is not whole characters as `bytes:\xe2\x80`, which is OpenAI's way: no two tokens
    have one name."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _finite(logprob: float) -> float:
    """As gRPC carries it (float32), and never an infinity."""
    return max(c_float(logprob).value, _MIN_LOGPROB)
