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

    Special tokens are no text, so no form allows them but those that end an answer, where it may end. Ids that the
    tokenizer does not know, such as padding rows of the model, are never allowed.
    """

    def __init__(self, token_bytes: Sequence[bytes], end_ids: Sequence[int]) -> None:
        """token_bytes: for each id that the model has logits for. end_ids: at least one, each with logits."""
        assert end_ids
        assert all(0 <= end_id < len(token_bytes) for end_id in end_ids)
        self.token_bytes = [b"" if token_id in end_ids else text for token_id, text in enumerate(token_bytes)]
        self.end_ids = tuple(end_ids)

    @classmethod
    def of(cls, text_bytes: Callable[[int], bytes], vocab_size: int, end_ids: Sequence[int]) -> Vocabulary:
        """text_bytes: a tokenizer's. vocab_size: the number of logits of the model."""
        return cls([*map(text_bytes, range(vocab_size))], end_ids)

    def to_json(self) -> str:
        """One line."""
        return json.dumps([[base64.b64encode(text).decode() for text in self.token_bytes], self.end_ids])

    @classmethod
    def from_json(cls, line: str) -> Vocabulary:
        texts, end_ids = json.loads(line)
        return cls([base64.b64decode(text) for text in texts], end_ids)

    def for_library(self) -> LLTokenizer:
        """Takes about a second for 50,000 tokens."""
        # Here, so that only a server that is asked for a form imports it.
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Tokens(self)), eos_token=[*self.end_ids])


class _Tokens:
    """What llguidance's wrapper asks of a tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.end_ids[0]
        self.bos_token_id = None
        self.tokens = vocabulary.token_bytes
        self.special_token_ids: list[int] = []

    def __call__(self, text: bytes) -> list[int]:
        raise AssertionError("grammars force no text, so none is tokenized")
