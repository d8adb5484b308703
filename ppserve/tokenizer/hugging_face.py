"""Vocabularies of Hugging Face, encoded by their own library: `tokenizer.json`, `vocab.json` and its neighbours.

Byte-level BPE only: a token is a string over GPT-2's alphabet, in which one character stands for each byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ppserve.errors import CheckpointError
from ppserve.files import MAX_JSON_BYTES, checked, read_bytes, read_json, reason
from ppserve.tokenizer.tokenizer import END_OF_TEXT, Tokenizer, by_id


class _AddedToken(msgspec.Struct, frozen=True):
    """A token beside those that merges make. special: left out of decoded text, never found in plain text."""

    content: str
    id: int
    special: bool = False


class _TokenizerConfig(msgspec.Struct, frozen=True):
    add_prefix_space: bool | None = None
    added_tokens_decoder: dict[int, dict[str, object]] | None = None
    """By id."""


def read_tokenizer_json(path: Path) -> Tokenizer:
    """A `tokenizer.json` with any splitting into words. Raises CheckpointError."""
    try:
        tokenizer = tokenizers.Tokenizer.from_str(read_bytes(path, MAX_JSON_BYTES).decode())
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(path, f"is not a tokenizer ({reason(error)})") from error
    return _checked(path, tokenizer)


def read_vocab_json(path: Path) -> Tokenizer:
    """`vocab.json` and `merges.txt`; `added_tokens.json` and `tokenizer_config.json` if they lie beside them.

    Raises CheckpointError.
    """
    vocab = read_json(path, dict[str, int])
    merges_file = path.with_name("merges.txt")
    read_bytes(merges_file, MAX_JSON_BYTES)
    config, added = _TokenizerConfig(), dict[int, _AddedToken]()
    listed_file, config_file = path.with_name("added_tokens.json"), path.with_name("tokenizer_config.json")
    if listed_file.exists():
        listed = read_json(listed_file, dict[str, int])
        added = {token_id: _AddedToken(text, token_id, special=True) for text, token_id in listed.items()}
    if config_file.exists():
        config = read_json(config_file, _TokenizerConfig)
    for token_id, entry in (config.added_tokens_decoder or {}).items():
        added[token_id] = checked(config_file, {**entry, "id": token_id}, _AddedToken)
    if len({token.content for token in added.values()}) < len(added):
        raise CheckpointError(path, "two added tokens have the same text", "added_tokens")
    try:
        _, merges = models.BPE.read_file(str(path), str(merges_file))
    except Exception as error:
        raise CheckpointError(merges_file, f"is no list of merges ({reason(error)})") from error
    try:
        tokenizer = byte_level_bpe(vocab, merges, added.values(), config.add_prefix_space is True)
    except Exception as error:
        raise CheckpointError(path, f"is not a vocabulary ({reason(error)})") from error
    return _checked(path, tokenizer)


def byte_level_bpe(
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    added: Iterable[_AddedToken],
    prefix_space: bool = False,
) -> tokenizers.Tokenizer:
    """GPT-2's tokenizer with this vocabulary. Raises Exception for what the library does not take."""
    added = list(added)
    # Added tokens keep their ids only if the model's own vocabulary has them.
    ids = vocab | {token.content: token.id for token in added}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token.content for token in added if token.special])
    tokenizer.add_tokens([token.content for token in added if not token.special])
    return tokenizer


def ranks_as_json(ranks: dict[bytes, int], end_of_text: int | None) -> bytes:
    """A `tokenizer.json` that joins the neighbours whose joint token has the lowest rank, as tiktoken does.

    Takes a second for GPT-2's 50,257 tokens.
    """
    alphabet = byte_alphabet()
    spelled = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((spelled[left], spelled[right]))
    added = [] if end_of_text is None else [_AddedToken(END_OF_TEXT, end_of_text, special=True)]
    tokenizer = byte_level_bpe({spelled[token]: rank for token, rank in ranks.items()}, merges, added)
    return tokenizer.to_str().encode()


def byte_alphabet() -> list[str]:
    """The character that stands for each byte.

    Bytes that Latin-1 prints stand for themselves; the others take the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _checked(path: Path, tokenizer: tokenizers.Tokenizer) -> Tokenizer:
    """Raises CheckpointError unless it is a byte-level BPE."""
    if not isinstance(tokenizer.model, models.BPE):
        raise CheckpointError(path, f"is {type(tokenizer.model).__name__}, not BPE", "model.type")
    for field in ("pre_tokenizer", "decoder"):
        if "ByteLevel" not in repr(getattr(tokenizer, field)):
            raise CheckpointError(path, "is not ByteLevel: only byte-level vocabularies are served", field)
    # A text has one encoding, and what a user types are no special tokens.
    tokenizer.model.dropout = None
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    if END_OF_TEXT in vocab:
        tokenizer.add_special_tokens([END_OF_TEXT])
    byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
    token_bytes = by_id(str(path), {_unspell(token, byte_of): token_id for token, token_id in vocab.items()})
    added = tokenizer.get_added_tokens_decoder()
    token_bytes |= {token_id: token.content.encode() for token_id, token in added.items()}
    special = [token_id for token_id, token in added.items() if token.special]

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return Tokenizer(str(path), encode, lambda: tokenizer.to_str().encode(), token_bytes, special)


def _unspell(token: str, byte_of: dict[str, int]) -> bytes:
    """The bytes of a token. One with a character outside the alphabet stands for its own text."""
    if all(character in byte_of for character in token):
        return bytes(byte_of[character] for character in token)
    return token.encode()
