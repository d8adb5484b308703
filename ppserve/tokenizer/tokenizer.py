"""Encoding and decoding with Hugging Face's tokenizers. Texts encode or raise ValueError; ids always decode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import tokenizers
from tokenizers import models

from ppserve.errors import CheckpointError

END_OF_TEXT = "<|endoftext|>"
MAX_MISSING_BYTES = 32


class Tokenizer:
    """A byte-level BPE: text to ids and back. Immutable, for any threads."""

    def __init__(self, source: object, library: tokenizers.Tokenizer) -> None:
        """source: the file's name, for messages. Raises CheckpointError for other kinds."""
        _check_kind(source, library)
        _encode_plainly(library)
        added = library.get_added_tokens_decoder()
        self.source = source
        self._library = library
        # Of a text in parts, some put a space before the first only.
        self._continuing = library
        if "prepend_scheme=first" in repr(library.pre_tokenizer):
            first, never = (f'"prepend_scheme":"{scheme}"' for scheme in ("first", "never"))
            self._continuing = tokenizers.Tokenizer.from_str(library.to_str().replace(first, never))
            self._continuing.encode_special_tokens = True
        spelled = library.get_vocab(with_added_tokens=True)
        self._token_bytes = _pieces(spelled) if library.model.byte_fallback else _byte_level(source, spelled)
        self._token_bytes |= {token_id: token.content.encode() for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_ids = {added[token_id].content: token_id for token_id in self._special}
        """The ids of special tokens, by their texts."""
        self.vocab_size = max(self._token_bytes, default=-1) + 1
        """One more than the highest id; 0 where no token is a text."""

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """Ids of text, never special ones. Raises only ValueError. continues: after a special token."""
        library = self._continuing if continues else self._library
        try:
            return list(library.encode(text, add_special_tokens=False).ids)
        except BaseException as error:
            # A panic in the library's Rust code is a BaseException, but no Exception.
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise ValueError(f"this text cannot be tokenized: {error}") from None
            raise

    def highest_encoded_id(self) -> int:
        """The highest id that text can encode to."""
        return max(self._token_bytes.keys() - self._special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, also of a special one; empty for an unknown id."""
        return self._token_bytes.get(token_id, b"")

    def text_bytes(self, token_id: int) -> bytes:
        """What the token adds to decoded text; nothing for special and unknown ones."""
        if token_id in self._special:
            return b""
        return self._token_bytes.get(token_id, b"")

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Invalid UTF-8 becomes U+FFFD; special and unknown tokens are left out."""
        return b"".join(map(self.text_bytes, ids)).decode("utf-8", "replace")

    def to_json(self) -> bytes:
        """As a `tokenizer.json`, for clients that tokenize by themselves."""
        return self._library.to_str().encode()


def no_tokenizer() -> Tokenizer:
    """A model without one: no text has tokens, no token a text."""
    return Tokenizer("no tokenizer", tokenizers.Tokenizer(models.BPE(byte_fallback=True)))


def byte_alphabet() -> list[str]:
    """Each byte's character where GPT-2 spells tokens: Latin-1's, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _check_kind(source: object, library: tokenizers.Tokenizer) -> None:
    if not isinstance(library.model, models.BPE):
        raise CheckpointError(source, f"is {type(library.model).__name__}, not BPE", "model.type")
    for field in () if library.model.byte_fallback else ("pre_tokenizer", "decoder"):
        if "ByteLevel" not in repr(getattr(library, field)):
            problem = "is neither ByteLevel, nor does the model fall back to bytes"
            raise CheckpointError(source, problem, field)


def _encode_plainly(library: tokenizers.Tokenizer) -> None:
    """A text has one encoding; what users type are no special tokens."""
    library.model.dropout = None
    library.encode_special_tokens = True
    library.no_truncation()
    library.no_padding()
    if library.token_to_id(END_OF_TEXT) is not None:
        library.add_special_tokens([END_OF_TEXT])


def _byte_level(source: object, vocab: Mapping[str, int]) -> dict[int, bytes]:
    """Each token's bytes. Raises CheckpointError unless all bytes are tokens, with own ids."""
    byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
    # SmolLM2 lacks control characters, and bytes that UTF-8 rarely or never has.
    missing = len(byte_of.keys() - vocab.keys())
    if missing > MAX_MISSING_BYTES:
        raise CheckpointError(source, f"not a byte-level vocabulary: {missing} of the 256 bytes are missing")
    tokens: dict[int, bytes] = {}
    for token, token_id in vocab.items():
        if token_id in tokens:
            raise CheckpointError(source, f"token id {token_id} is given to two tokens")
        # One with a character outside the alphabet is its own text.
        is_spelled = byte_of.keys() >= set(token)
        tokens[token_id] = bytes(map(byte_of.__getitem__, token)) if is_spelled else token.encode()
    return tokens


def _pieces(vocab: Mapping[str, int]) -> dict[int, bytes]:
    tokens = {token_id: token.replace("\u2581", " ").encode() for token, token_id in vocab.items()}
    return tokens | {vocab[f"<0x{byte:02X}>"]: bytes([byte]) for byte in range(256) if f"<0x{byte:02X}>" in vocab}
