"""A model's tokens as llguidance wants them: the bytes that each adds to a text."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class Vocabulary:
    """The bytes of each token of a model, by id.

    Special tokens are no text, so no form allows them, but for those that end an answer where it may end. Ids that
    the tokenizer does not know, such as padding rows of the model, are never allowed.
    """

    def __init__(self, token_bytes: Sequence[bytes], end_ids: Sequence[int]) -> None:
        """token_bytes: an entry for each id for which the model has logits. end_ids: at least one such id."""
        assert end_ids
        assert all(0 <= end_id < len(token_bytes) for end_id in end_ids)
        self.token_bytes = [b"" if token_id in end_ids else text for token_id, text in enumerate(token_bytes)]
        self.end_ids = tuple(end_ids)

    @classmethod
    def of(cls, text_bytes: Callable[[int], bytes], vocab_size: int, end_ids: Sequence[int]) -> Vocabulary:
        """Make the vocabulary of a tokenizer, whose `text_bytes` this is. vocab_size: how many logits the model
        has."""
        return cls([*map(text_bytes, range(vocab_size))], end_ids)

    def to_json(self) -> str:
        """Return the vocabulary as JSON in one line."""
        return json.dumps([[base64.b64encode(text).decode() for text in self.token_bytes], self.end_ids])

    @classmethod
    def from_json(cls, line: str) -> Vocabulary:
        texts, end_ids = json.loads(line)
        return cls([base64.b64decode(text) for text in texts], end_ids)

    def for_library(self) -> LLTokenizer:
        """Return llguidance's form of it. For 50,000 tokens this takes about a second."""
        # It is imported here, so that only a server that is asked for a form imports it.
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Tokens(self)), eos_token=[*self.end_ids])


class _Tokens:
    """A tokenizer with what llguidance's wrapper asks for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.end_ids[0]
        self.bos_token_id = None
        self.tokens = vocabulary.token_bytes
        self.special_token_ids: list[int] = []

    def __call__(self, text: bytes) -> list[int]:
        raise AssertionError("grammars force no text, so none is tokenized")
