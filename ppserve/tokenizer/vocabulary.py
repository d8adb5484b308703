"""A byte-level BPE vocabulary as its files declare it, checked before tiktoken gets it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ppserve.errors import CheckpointError
from ppserve.files import shown

NormalForm = Literal["NFC", "NFD", "NFKC", "NFKD"]

END_OF_TEXT = "<|endoftext|>"
MAX_TOKENS = 2**20
MAX_TOKEN_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that no merge makes. special: left out of decoded text, and never found in plain text."""

    content: str
    id: int
    special: bool = False


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model and how text is made of them.

    source: the file, for messages. ids: token bytes -> id. merge_order: tokens of two and more bytes in the order
    of their merges; None: that is the order of their ids, as in GPT-2's vocabulary (`check_id_order` checks it).
    added: tokens beside these. prefix_space: text that does not begin with a space is encoded as if it did.
    normal_form: the Unicode normal form that text is converted to before it is encoded.

    All bytes are there, ids are distinct and sizes are within bounds, or CheckpointError is raised.
    """

    source: str
    ids: Mapping[bytes, int]
    merge_order: tuple[bytes, ...] | None = None
    added: tuple[AddedToken, ...] = ()
    prefix_space: bool = False
    normal_form: NormalForm | None = None

    def __post_init__(self) -> None:
        if len(self.ids) + len(self.added) > MAX_TOKENS:
            raise CheckpointError(self.source, f"more than {MAX_TOKENS} tokens")
        if any(len(token) > MAX_TOKEN_BYTES for token in self.ids):
            raise CheckpointError(self.source, f"a token is longer than {MAX_TOKEN_BYTES} bytes")
        missing = sum(bytes([b]) not in self.ids for b in range(256))
        if missing:
            problem = f"not a byte-level vocabulary: {missing} of the 256 bytes are missing"
            raise CheckpointError(self.source, problem)
        for token in self.added:
            # JSON can spell half a surrogate pair, UTF-8 cannot.
            if not token.content or any("\ud800" <= character <= "\udfff" for character in token.content):
                raise CheckpointError(self.source, f"{shown(token.content)} is no text", "added_tokens")
        seen: set[int] = set()
        for token_id in (*self.ids.values(), *(token.id for token in self.added)):
            if not 0 <= token_id < MAX_TOKENS:
                raise CheckpointError(self.source, f"token id {token_id} is not within 0 to {MAX_TOKENS - 1}")
            if token_id in seen:
                raise CheckpointError(self.source, f"token id {token_id} is given to two tokens")
            seen.add(token_id)
        if self.merge_order is None:
            check_id_order(self.source, self.ids)

    def ranks(self) -> dict[bytes, int]:
        """Token bytes -> merge rank, as tiktoken needs it: 0, 1, 2, … with single bytes first."""
        if self.merge_order is None:
            return dict(self.ids)
        singles = sorted((token for token in self.ids if len(token) == 1), key=self.ids.__getitem__)
        return {token: rank for rank, token in enumerate((*singles, *self.merge_order))}


def check_id_order(source: str, ids: Mapping[bytes, int]) -> None:
    """Raises CheckpointError unless every token can be merged from two tokens with lower ids.

    No merge makes single bytes, so their ids may be any.
    """
    for token, token_id in ids.items():
        cuts = range(1, len(token))
        if cuts and not any(_rank(ids, token[:cut]) < token_id > _rank(ids, token[cut:]) for cut in cuts):
            raise CheckpointError(
                source,
                f"ids are not in merge order (token {token_id}, {shown(token)}, is not made of earlier ones); "
                "merges.txt or tokenizer.json beside it would settle the order",
            )


def _rank(ids: Mapping[bytes, int], token: bytes) -> int:
    return -1 if len(token) == 1 else ids.get(token, MAX_TOKENS)


def spelling() -> dict[str, int]:
    """GPT-2's printable alphabet: the character that stands for each byte in vocab.json and merges.txt.

    Bytes that Latin-1 prints stand for themselves; the others take the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (b for b in range(256) if b not in printable)
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
