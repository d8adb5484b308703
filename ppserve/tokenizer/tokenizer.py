"""Encoding and decoding with Hugging Face's tokenizers. Texts encode or raise ValueError; ids always decode.

A caller's text stays text even where it spells a special token. A special token that the server itself writes is
given to the library under a secret name, so that the library finds it and treats the text around it as usual.
"""

from __future__ import annotations

import math
import secrets
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, chain, takewhile
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken, models

from ppserve.errors import CheckpointError

END_OF_TEXT = "<|endoftext|>"
MAX_MISSING_BYTES = 32


class Tokenizer:
    """A byte-level BPE that turns text into ids and back. It is immutable, and any thread may use it."""

    def __init__(self, source: object, library: tokenizers.Tokenizer) -> None:
        """source: the file's name, for messages. Raises CheckpointError if `library` is not a byte-level BPE."""
        _check_kind(source, library)
        _encode_plainly(library)
        self.source = source
        self.begin, self.end = _surroundings(library)
        """The ids that its post-processor puts before and after a text."""
        self._json = library.to_str().encode()
        added = library.get_added_tokens_decoder()
        spelled = library.get_vocab(with_added_tokens=True)
        self._token_bytes = _pieces(spelled) if library.model.byte_fallback else _byte_level(source, spelled)
        self._token_bytes |= {token_id: token.content.encode() for token_id, token in added.items()}
        self._added = frozenset(added)
        special = {token_id: token for token_id, token in added.items() if token.special}
        self._special = frozenset(special)
        self.special_ids = {token.content: token_id for token_id, token in special.items()}
        """The ids of special tokens, by their texts."""
        self.vocab_size = max(self._token_bytes, default=-1) + 1
        """The highest id plus one; 0 for an empty tokenizer."""
        self._names = _secret_names(self.special_ids)
        self._library = _with_names(library, special.values(), self._names)
        ids = ((self._library.token_to_id(name), self.special_ids[text]) for text, name in self._names.items())
        self._named: dict[int | None, int] = dict(ids)
        """The ids of special tokens, by the ids that their secret names have in the library."""

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """Return the ids of a text, none of them special. Raises only ValueError.

        continues: whether the text is encoded as if it followed a special token.
        """
        if continues and self.special_ids:
            return self.encode_parts(["", next(iter(self.special_ids)), text])[1:]
        return self.encode_parts([text])

    def encode_parts(self, parts: Sequence[str], surrounds: bool = False) -> list[int]:
        """Return the ids of one text, whose parts are texts and special tokens in turn. Raises only ValueError.

        surrounds: whether `begin` and `end` are put around it, unless the parts already have them.
        """
        try:
            ids = self._encode(parts)
        except BaseException as error:
            # A panic in the library's Rust code is a BaseException, but no Exception.
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise ValueError(f"this text cannot be tokenized: {error}") from None
            raise
        if surrounds and not (len(parts) > 1 and ids[: len(self.begin)] == self.begin):
            ids = self.begin + ids
        if surrounds and not (len(parts) > 1 and ids[len(ids) - len(self.end) :] == self.end):
            ids = ids + self.end
        return ids

    def _encode(self, parts: Sequence[str]) -> list[int]:
        named = {place: self._names[part] for place, part in enumerate(parts) if place % 2}
        while True:
            written = [named.get(place, part) for place, part in enumerate(parts)]
            encoding = self._library.encode("".join(written), add_special_tokens=False)
            ids = encoding.ids
            if not named:
                return list(ids)
            found = [place for place, token_id in enumerate(ids) if token_id in self._named]
            if len(found) == len(named):
                return [self._named.get(token_id, token_id) for token_id in ids]
            # The library took some names for text at their places, as `single_word` or `normalized` may require.
            starts = [*accumulate(map(len, written), initial=0)]
            offsets = encoding.offsets  # each access makes a new list
            spans = sorted(offsets[place] for place in found)
            named = {place: name for place, name in named.items() if _are_over(spans, starts[place] + 1)}

    def highest_encoded_id(self) -> int:
        """Return the highest id that encoding a text can give, without regard to tokens that were added to the
        vocabulary."""
        return max([*self.begin, *self.end, *(self._token_bytes.keys() - self._added)], default=-1)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, special or not; empty for an unknown id."""
        return self._token_bytes.get(token_id, b"")

    def text_bytes(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to decoded text; empty for special and unknown tokens."""
        if token_id in self._special:
            return b""
        return self._token_bytes.get(token_id, b"")

    def decode(self, ids: Iterable[int], skips_special: bool = True) -> str:
        """Return the text of `ids`. Invalid UTF-8 becomes U+FFFD. Unknown tokens are left out. skips_special:
        whether special tokens are left out, too; otherwise their names are in the text."""
        bytes_of = self.text_bytes if skips_special else self.token_bytes
        return b"".join(map(bytes_of, ids)).decode("utf-8", "replace")

    def to_json(self) -> bytes:
        """Return the tokenizer as a `tokenizer.json`, for clients that tokenize by themselves."""
        return self._json


def _are_over(spans: Sequence[tuple[int, int]], place: int) -> bool:
    """Return whether one of these spans contains `place`. They are sorted and do not overlap."""
    before = bisect_right(spans, (place, math.inf))
    return before > 0 and place < spans[before - 1][1]


def no_tokenizer() -> Tokenizer:
    """Return the empty tokenizer, of a model that has none: no text has tokens, and no token has a text."""
    return Tokenizer("no tokenizer", tokenizers.Tokenizer(models.BPE(byte_fallback=True)))


def byte_alphabet() -> list[str]:
    """Return the character by which GPT-2 spells each byte: Latin-1's if that is printable, else one from U+0100
    on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _check_kind(source: object, library: tokenizers.Tokenizer) -> None:
    if not isinstance(library.model, models.BPE):
        raise CheckpointError(source, f"is {type(library.model).__name__}, not BPE", "model.type")
    for field in () if library.model.byte_fallback else ("pre_tokenizer", "decoder"):
        if "ByteLevel" not in repr(getattr(library, field)):
            problem = "is not ByteLevel, and the model does not fall back to bytes"
            raise CheckpointError(source, problem, field)


def _encode_plainly(library: tokenizers.Tokenizer) -> None:
    """Configure the library so that a text has one encoding, and a user's text has no special tokens."""
    library.model.dropout = None
    library.encode_special_tokens = True
    library.no_truncation()
    library.no_padding()
    if library.token_to_id(END_OF_TEXT) is not None:
        library.add_special_tokens([END_OF_TEXT])


def _surroundings(library: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that the post-processor puts before and after a text. They become special tokens of the
    library."""
    around = library.encode("a")
    is_added = around.special_tokens_mask
    library.add_special_tokens(
        [
            token
            for token, token_id, added in zip(around.tokens, around.ids, is_added, strict=True)
            if added and library.token_to_id(token) == token_id
        ]
    )
    num_before = len(list(takewhile(bool, is_added)))
    num_after = len(list(takewhile(bool, reversed(is_added[num_before:]))))
    return around.ids[:num_before], around.ids[len(around.ids) - num_after :]


def _secret_names(texts: Iterable[str]) -> dict[str, str]:
    """Return names for special tokens that nobody can guess. A name begins and ends like its token's text, because
    the characters next to other tokens may matter."""
    secret = secrets.token_hex(16)
    return {text: f"{text[:1]}{secret}{number:08x}{text[-1:]}" for number, text in enumerate(texts)}


def _with_names(
    library: tokenizers.Tokenizer, special: Collection[AddedToken], names: Mapping[str, str]
) -> tokenizers.Tokenizer:
    """Make the library find special tokens by their names only, and never in a text, even if merges would make one
    from it."""
    made = {
        text for text in names if library.token_to_id(text) in library.encode(text, add_special_tokens=False).ids
    }
    if made:
        document = msgspec.json.decode(library.to_str())
        _rename(document, made, names)
        library = tokenizers.Tokenizer.from_str(msgspec.json.encode(document).decode())
        library.encode_special_tokens = True
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    library.add_tokens(
        [
            AddedToken(names[token.content], special=False, **{flag: getattr(token, flag) for flag in flags})
            for token in special
        ]
    )
    return library


def _rename(document: dict[str, Any], texts: set[str], names: Mapping[str, str]) -> None:
    """Rename the tokens `texts` in a `tokenizer.json`, except those that are parts of other tokens."""
    model = document["model"]
    texts = {text for text in texts - {*chain.from_iterable(model["merges"])} if len(text) > 1}
    vocab = model["vocab"].items()
    model["vocab"] = {names[text] if text in texts else text: token_id for text, token_id in vocab}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in texts]
    if model["unk_token"] in texts:
        model["unk_token"] = names[model["unk_token"]]
    for token in document["added_tokens"]:
        if token["content"] in texts:
            token |= {"content": names[token["content"]], "special": False}


def _byte_level(source: object, vocab: Mapping[str, int]) -> dict[int, bytes]:
    """Return each token's bytes, by id. Raises CheckpointError if tokens share an id, or too many bytes are
    missing."""
    byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
    # SmolLM2 lacks control characters, and bytes that are rare or absent in UTF-8.
    missing = len(byte_of.keys() - vocab.keys())
    if missing > MAX_MISSING_BYTES:
        raise CheckpointError(source, f"not a byte-level vocabulary: {missing} of the 256 bytes are missing")
    tokens: dict[int, bytes] = {}
    for token, token_id in vocab.items():
        if token_id in tokens:
            raise CheckpointError(source, f"token id {token_id} is given to two tokens")
        # A token with a character outside the alphabet stands for its own text.
        is_spelled = byte_of.keys() >= set(token)
        tokens[token_id] = bytes(map(byte_of.__getitem__, token)) if is_spelled else token.encode()
    return tokens


def _pieces(vocab: Mapping[str, int]) -> dict[int, bytes]:
    tokens = {token_id: token.replace("\u2581", " ").encode() for token, token_id in vocab.items()}
    return tokens | {vocab[f"<0x{byte:02X}>"]: bytes([byte]) for byte in range(256) if f"<0x{byte:02X}>" in vocab}
