"""Encoding and decoding with tiktoken. Any text encodes or raises ValueError; any ids decode."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

from ppserve.tokenizer.tokenizer_json import tokenizer_json
from ppserve.tokenizer.vocabulary import END_OF_TEXT, Vocabulary


class Tokenizer:
    """Text to ids and back. Immutable: any number of threads may encode at once.

    source: the file it was read from, for messages. vocab_size: one more than the highest id. eos_id: the id of
    `<|endoftext|>`, None when the vocabulary has none.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.source = vocabulary.source
        ranks = vocabulary.ranks()
        ids = vocabulary.ids
        self._token_bytes: dict[int, bytes] = {token_id: token for token, token_id in ids.items()}
        self._token_bytes |= {token.id: token.content.encode() for token in vocabulary.added}
        self._special = frozenset(token.id for token in vocabulary.added if token.special)
        self.vocab_size = max(self._token_bytes) + 1
        self.eos_id = next((token.id for token in vocabulary.added if token.content == END_OF_TEXT), None)
        self._prefix_space = vocabulary.prefix_space
        self._normal_form = vocabulary.normal_form
        # Added tokens that are ordinary text are matched before the text is split, as Hugging Face's tokenizers
        # do. tiktoken calls such tokens special, and needs numbers for them above all ranks.
        plain = [token for token in vocabulary.added if not token.special]
        self._plain_added = {token.content for token in plain}
        numbers = {token.content: max(ranks.values()) + 1 + i for i, token in enumerate(plain)}
        self._encoding = tiktoken.Encoding(
            vocabulary.source, pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=numbers
        )
        pairs = [(rank, ids[token]) for token, rank in ranks.items()]
        pairs += [(numbers[token.content], token.id) for token in plain]
        self._id_of_rank = None if all(rank == token_id for rank, token_id in pairs) else dict(pairs)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, in which `<|endoftext|>` is ordinary characters. Raises only ValueError."""
        if self._normal_form is not None:
            text = unicodedata.normalize(self._normal_form, text)
        if self._prefix_space and text and not text.startswith(" "):
            text = " " + text
        try:
            ranks = self._encoding.encode(text, allowed_special=self._plain_added, disallowed_special=())
        except BaseException as error:
            # A panic in tiktoken's Rust code is a BaseException, but no Exception.
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise ValueError(f"this text cannot be tokenized: {error}") from None
            raise
        return ranks if self._id_of_rank is None else [self._id_of_rank[rank] for rank in ranks]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, also of a special one; empty for an id that no token has."""
        return self._token_bytes.get(token_id, b"")

    def text_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to decoded text; none for special and unknown tokens."""
        return b"" if token_id in self._special else self._token_bytes.get(token_id, b"")

    def to_json(self) -> bytes:
        """The same tokenizer as a `tokenizer.json`. Takes a second for GPT-2's 50,257 tokens."""
        return tokenizer_json(self._vocabulary)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Invalid UTF-8 becomes U+FFFD; special and unknown tokens are left out."""
        return b"".join(map(self.text_bytes, ids)).decode("utf-8", "replace")
