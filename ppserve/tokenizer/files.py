"""Readers of the four vocabulary formats. Each returns a `Vocabulary` or raises CheckpointError.

tiktoken's own loaders cache by path, so an edited file would be read as it was before; hence our own.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ppserve.errors import CheckpointError
from ppserve.files import checked, read_bytes, read_json, shown
from ppserve.tokenizer.vocabulary import END_OF_TEXT, MAX_TOKENS, AddedToken, NormalForm, Vocabulary, spelling

MAX_FILE_BYTES = 64 * 2**20
BIN_MAGIC = 20240328
BIN_HEADER_BYTES = 256 * 4
_BYTE_OF = spelling()


class _Bpe(msgspec.Struct, frozen=True):
    """Merges of bytes: words have no marks at their ends. Newer files write pairs as lists, older ones as text."""

    vocab: dict[str, Any]
    merges: list[str | list[str]]
    type: Literal["BPE"] = "BPE"
    continuing_subword_prefix: Literal["", None] = None
    end_of_word_suffix: Literal["", None] = None
    byte_fallback: bool | None = None


class _Splitter(msgspec.Struct, frozen=True):
    """GPT-2's own way to split text into words."""

    type: Literal["ByteLevel"]
    use_regex: bool = True
    add_prefix_space: bool = False


class _Normalizer(msgspec.Struct, frozen=True):
    """GPT-2's own text is not normalised; some of its relatives are trained on one of Unicode's normal forms."""

    type: NormalForm | Literal["Sequence"]
    normalizers: Annotated[list[Any], msgspec.Meta(max_length=0)] = []


class _TokenizerFile(msgspec.Struct, frozen=True):
    model: _Bpe
    pre_tokenizer: _Splitter
    normalizer: _Normalizer | None = None
    added_tokens: tuple[AddedToken, ...] | None = None


class _TokenizerConfig(msgspec.Struct, frozen=True):
    """added_tokens_decoder: by id."""

    add_prefix_space: bool | None = None
    added_tokens_decoder: dict[int, dict[str, Any]] | None = None


def read_tokenizer_json(path: Path) -> Vocabulary:
    """Hugging Face `tokenizer.json`: a BPE model with a ByteLevel pre-tokenizer, as GPT-2 has it."""
    document = read_json(path, _TokenizerFile, MAX_FILE_BYTES)
    model, splitter, normalizer = document.model, document.pre_tokenizer, document.normalizer
    if model.byte_fallback:
        raise CheckpointError(path, "not part of a byte-level vocabulary", "model.byte_fallback")
    if not splitter.use_regex:
        raise CheckpointError(path, "only GPT-2's own splitting is supported", "pre_tokenizer.use_regex")
    merges, added = _merge_pairs(path, model.merges), document.added_tokens or ()
    normal_form = None if normalizer is None or normalizer.type == "Sequence" else normalizer.type
    return _from_spelled(path, model.vocab, merges, added, splitter.add_prefix_space, normal_form)


def read_vocab_json(path: Path) -> Vocabulary:
    """`vocab.json`, and `merges.txt`, `added_tokens.json` and `tokenizer_config.json` if they lie beside it."""
    merges_file = path.with_name("merges.txt")
    merges = _merge_pairs(merges_file, _merge_lines(merges_file)) if merges_file.exists() else None
    added: dict[int, AddedToken] = {}
    listed_file = path.with_name("added_tokens.json")
    if listed_file.exists():
        listed = read_json(listed_file, dict[str, int], MAX_FILE_BYTES)
        added |= {token_id: AddedToken(text, token_id, special=True) for text, token_id in listed.items()}
    config, config_file = _TokenizerConfig(), path.with_name("tokenizer_config.json")
    if config_file.exists():
        config = read_json(config_file, _TokenizerConfig, MAX_FILE_BYTES)
    for token_id, entry in (config.added_tokens_decoder or {}).items():
        added[token_id] = checked(config_file, {**entry, "id": token_id}, AddedToken)
    vocab = read_json(path, dict[str, Any], MAX_FILE_BYTES)
    return _from_spelled(path, vocab, merges, tuple(added.values()), config.add_prefix_space is True)


def read_llmc_bin(path: Path) -> Vocabulary:
    """llm.c's `gpt2_tokenizer.bin`: 256 header words, then each token as one length byte and its bytes."""
    content = read_bytes(path, MAX_FILE_BYTES)
    if len(content) < BIN_HEADER_BYTES:
        raise CheckpointError(path, f"only {len(content)} bytes, shorter than its header")
    magic, version, count, end_of_text = struct.unpack_from("<4I", content)
    if magic != BIN_MAGIC:
        raise CheckpointError(path, f"{magic} is not {BIN_MAGIC}", "magic")
    if version not in (1, 2):
        raise CheckpointError(path, f"{version} is not supported, only 1 and 2", "version")
    if not 0 < count <= MAX_TOKENS:
        raise CheckpointError(path, f"{count} tokens are not within 1 to {MAX_TOKENS}", "vocab_size")
    tokens = _length_prefixed(path, content, count)
    if version == 1:  # only written for GPT-2's own vocabulary; the header does not name the end of text
        end_of_text = tokens.index(END_OF_TEXT.encode()) if END_OF_TEXT.encode() in tokens else 50256
    ids = {token: token_id for token_id, token in enumerate(tokens) if token_id != end_of_text}
    if len(ids) != count - (end_of_text < count):
        raise CheckpointError(path, "a token occurs twice")
    added = (AddedToken(END_OF_TEXT, end_of_text, special=True),) if end_of_text < count else ()
    return Vocabulary(str(path), ids, added=added)


def read_tiktoken(path: Path) -> Vocabulary:
    """tiktoken's own format: lines of base64 token and rank. `<|endoftext|>` gets the lowest unused id."""
    ids: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path, MAX_FILE_BYTES).splitlines(), 1):
        if not line:
            continue
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
            token_id = int(rank)
        except (ValueError, binascii.Error):
            raise CheckpointError(path, "not a base64 token and its rank", f"line {number}") from None
        if token in ids or not token:
            raise CheckpointError(path, "this token is empty or occurs twice", f"line {number}")
        ids[token] = token_id
    taken = set(ids.values())
    free = next(token_id for token_id in range(len(ids) + 1) if token_id not in taken)
    added = (AddedToken(END_OF_TEXT, free, special=True),)
    return Vocabulary(str(path), ids, added=added)


def _merge_lines(path: Path) -> list[str]:
    try:
        lines = read_bytes(path, MAX_FILE_BYTES).decode().splitlines()
    except UnicodeDecodeError:
        raise CheckpointError(path, "not UTF-8") from None
    return [line for line in lines if line and not line.startswith("#version")]


def _merge_pairs(path: Path, merges: Sequence[str | list[str]]) -> list[bytes]:
    """What each merge joins, in order."""
    joined = []
    for number, merge in enumerate(merges):
        match merge.split(" ") if isinstance(merge, str) else merge:
            case [first, second]:
                joined.append(_unspell(path, first) + _unspell(path, second))
            case _:
                raise CheckpointError(path, f"{shown(merge)} is not a pair", f"merges, entry {number}")
    return joined


def _unspell(path: Path, spelled: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in spelled)
    except KeyError as error:
        problem = f"{shown(spelled)}: {error} is not in the byte-level alphabet"
        raise CheckpointError(path, problem) from None


def _from_spelled(
    path: Path,
    vocab: dict[str, Any],
    merges: list[bytes] | None,
    added: tuple[AddedToken, ...],
    prefix_space: bool,
    normal_form: NormalForm | None = None,
) -> Vocabulary:
    """Checks a Hugging Face vocabulary against its merges, which decide the order in which pairs are joined."""
    for spelled, token_id in vocab.items():
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            problem = f"its id {shown(token_id)} is not an integer"
            raise CheckpointError(path, problem, f"token {shown(repr(spelled))}")
    if END_OF_TEXT in vocab and END_OF_TEXT not in {token.content for token in added}:
        added = (*added, AddedToken(END_OF_TEXT, vocab[END_OF_TEXT], special=True))
    apart = {token.content for token in added}
    ids = {_unspell(path, spelled): token_id for spelled, token_id in vocab.items() if spelled not in apart}
    if merges is None:
        return Vocabulary(str(path), ids, None, added, prefix_space, normal_form)
    order = tuple(dict.fromkeys(merges))
    marks = _check_merges(path, ids, order)
    added = (*added, *(AddedToken(mark.decode(), ids.pop(mark), special=True) for mark in marks))
    return Vocabulary(str(path), ids, order, added, prefix_space, normal_form)


def _check_merges(path: Path, ids: dict[bytes, int], order: tuple[bytes, ...]) -> list[bytes]:
    """Merges and vocabulary must speak of the same tokens. Returns marks such as `<pad>`, which no merge makes."""
    made = set(order)
    unknown = next((token for token in order if token not in ids), None)
    if unknown is not None:
        raise CheckpointError(path, f"a merge makes {shown(unknown)}, which is not in the vocabulary", "merges")
    unmade = [token for token in ids if len(token) > 1 and token not in made]
    marks = [token for token in unmade if token[:1] + token[-1:] in (b"<>", b"[]") and token.isascii()]
    if len(marks) < len(unmade):
        example = next(token for token in unmade if token not in marks)
        raise CheckpointError(path, f"no merge makes {shown(example)} ({len(unmade)} such tokens)", "merges")
    return marks


def _length_prefixed(path: Path, content: bytes, count: int) -> list[bytes]:
    tokens, at = [], BIN_HEADER_BYTES
    for token_id in range(count):
        length = content[at] if at < len(content) else 0
        if length == 0 or at + 1 + length > len(content):
            raise CheckpointError(path, "the file ends within it, or it is empty", f"token {token_id}")
        tokens.append(content[at + 1 : at + 1 + length])
        at += 1 + length
    if at != len(content):
        raise CheckpointError(path, f"{len(content) - at} bytes follow the last token")
    return tokens


Reader = Callable[[Path], Vocabulary]
READERS: tuple[tuple[str, Reader], ...] = (
    ("tokenizer.json", read_tokenizer_json),
    ("vocab.json", read_vocab_json),
    ("gpt2_tokenizer.bin", read_llmc_bin),
    ("tokenizer.tiktoken", read_tiktoken),
)
