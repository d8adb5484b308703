"""Encoding and decoding. Any text encodes or raises ValueError; any ids decode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ppserve.errors import CheckpointError

END_OF_TEXT = "<|endoftext|>"


class Tokenizer:
    """Text to ids and back. Immutable: any number of threads may use it at once."""

    def __init__(
        self,
        source: str,
        encode: Callable[[str], list[int]],
        to_json: Callable[[], bytes],
        token_bytes: Mapping[int, bytes],
        special: Iterable[int],
    ) -> None:
        """encode: a library's, in which special tokens are ordinary text. token_bytes: by id. special: ids that
        are left out of decoded text."""
        self.source = source
        """The file it was read from, for messages."""
        self.vocab_size = max(token_bytes) + 1
        """One more than the highest id."""
        self.to_json = to_json
        """Writes the same tokenizer as a `tokenizer.json`, for clients that tokenize by themselves."""
        self._encode = encode
        self._token_bytes = token_bytes
        self._special = frozenset(special)
        ends = (token_id for token_id in self._special if token_bytes[token_id] == END_OF_TEXT.encode())
        self.eos_id = next(ends, None)
        """The id of `<|endoftext|>`; None when the vocabulary has none."""

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, in which `<|endoftext|>` is ordinary characters. Raises only ValueError."""
        try:
            return self._encode(text)
        except BaseException as error:
            # A panic in the libraries' Rust code is a BaseException, but no Exception.
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise ValueError(f"this text cannot be tokenized: {error}") from None
            raise

    def highest_encoded_id(self) -> int:
        """The highest id that text can encode to."""
        return max(self._token_bytes.keys() - self._special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, also of a special one; empty for an id that no token has."""
        return self._token_bytes.get(token_id, b"")

    def text_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to decoded text; none for special and unknown tokens."""
        return b"" if token_id in self._special else self._token_bytes.get(token_id, b"")

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Invalid UTF-8 becomes U+FFFD; special and unknown tokens are left out."""
        return b"".join(map(self.text_bytes, ids)).decode("utf-8", "replace")


def by_id(source: str, ids: Mapping[bytes, int]) -> dict[int, bytes]:
    """Tokens by their ids. Raises CheckpointError unless every byte is a token and no id is given twice."""
    missing = sum(bytes([byte]) not in ids for byte in range(256))
    if missing:
        raise CheckpointError(source, f"not a byte-level vocabulary: {missing} of the 256 bytes are missing")
    tokens = {token_id: token for token, token_id in ids.items()}
    if len(tokens) < len(ids):
        twice = next(token_id for token, token_id in ids.items() if tokens[token_id] != token)
        raise CheckpointError(source, f"token id {twice} is given to two tokens")
    return tokens
