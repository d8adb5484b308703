"""Log-probabilities as the two interfaces show them: lists per sequence (completions), lists of tokens (chats)."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from ctypes import c_float

import msgspec

from ppserve.head.api.stream import Score

# JSON has no infinity; vLLM's value.
_MIN_LOGPROB = -9999.0

ScoredToken = tuple[int, Score]
BytesOf = Callable[[int], bytes]


class LogprobsJson(msgspec.Struct):
    """Log-probabilities of completions: an entry for each token in every list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """null for the first token of a prompt."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Where the token begins in the sequence's text, in characters."""


class TopTokenJson(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenJson(TopTokenJson):
    top_logprobs: list[TopTokenJson]


class ChatLogprobsJson(msgspec.Struct):
    """Log-probabilities of chats."""

    content: list[TokenJson]


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

    def completion(self, prompt: Iterable[ScoredToken], generated: Iterable[ScoredToken]) -> LogprobsJson:
        """Of the sequence's next tokens. prompt: those of the prompt where they are asked for and come first. Its
        text and the generated one are decoded apart: a character is not completed across them."""
        lists = LogprobsJson([], [], [], [])
        self._add(lists, prompt)
        self._offset += len(self._decoder.decode(b"", final=True)) if lists.tokens else 0
        self._add(lists, generated)
        return lists

    def _add(self, lists: LogprobsJson, scored: Iterable[ScoredToken]) -> None:
        for token_id, score in scored:
            name = self._name(token_id)
            lists.tokens.append(name)
            lists.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(self._text_bytes(token_id)))
            if score is None:
                lists.token_logprobs.append(None)
                lists.top_logprobs.append(None)
                continue
            logprob = _finite(score.logprob)
            # The likeliest come first: where two tokens have one name, the first of them keeps it.
            top: dict[str, float] = {}
            for top_id, top_logprob in score.top:
                top.setdefault(self._name(top_id), _finite(top_logprob))
            top.setdefault(name, logprob)
            lists.token_logprobs.append(logprob)
            lists.top_logprobs.append(top)

    def chat(self, scored: Iterable[ScoredToken]) -> ChatLogprobsJson:
        """Of the sequence's next tokens."""
        entries = []
        for token_id, score in scored:
            assert score is not None, "only the first token of a prompt has no score"
            top = [TopTokenJson(*self._entry(top_id, top_logprob)) for top_id, top_logprob in score.top]
            entries.append(TokenJson(*self._entry(token_id, score.logprob), top))
        return ChatLogprobsJson(entries)

    def _entry(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        return self._name(token_id), _finite(logprob), list(self._token_bytes(token_id))

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
