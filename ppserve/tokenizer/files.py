"""Readers of the four vocabulary formats. Each returns a `Vocabulary` or raises CheckpointError.

tiktoken's own loaders cache by path, so an edited file would be read as it was before; hence our own.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import stat
import struct
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppserve.errors import CheckpointError
from ppserve.tokenizer.vocabulary import (
    END_OF_TEXT,
    MAX_TOKENS,
    NORMAL_FORMS,
    AddedToken,
    NormalForm,
    Vocabulary,
    check_vocabulary,
    shown,
    spelling,
)

MAX_FILE_BYTES = 64 * 2**20
BIN_MAGIC = 20240328
BIN_HEADER_BYTES = 256 * 4
_BYTE_OF = spelling()


def read_tokenizer_json(path: Path) -> Vocabulary:
    """Hugging Face `tokenizer.json`: a BPE model with a ByteLevel pre-tokenizer, as GPT-2 has it."""
    document = _read_json(path)
    model = _field(path, document, "model", dict)
    if model.get("type", "BPE") != "BPE":
        raise CheckpointError(path, f"{shown(model['type'])} is not supported, only 'BPE'", "model.type")
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(name):
            raise CheckpointError(path, "not part of a byte-level vocabulary", f"model.{name}")
    normal_form = _normal_form(path, document.get("normalizer"))
    splitter = _field(path, document, "pre_tokenizer", dict)
    if splitter.get("type") != "ByteLevel" or not splitter.get("use_regex", True):
        raise CheckpointError(path, "only GPT-2's ByteLevel splitting is supported", "pre_tokenizer")
    added = _added_tokens(path, _field(path, document, "added_tokens", list, default=[]))
    merges = _merge_pairs(path, _field(path, model, "merges", list))
    prefix_space = bool(splitter.get("add_prefix_space", False))
    vocabulary = _from_spelled(path, _field(path, model, "vocab", dict), merges, added, prefix_space)
    return replace(vocabulary, normal_form=normal_form)


def read_vocab_json(path: Path) -> Vocabulary:
    """`vocab.json`, and `merges.txt`, `added_tokens.json` and `tokenizer_config.json` if they lie beside it."""
    merges_file = path.with_name("merges.txt")
    merges = _merge_pairs(merges_file, _merge_lines(merges_file)) if merges_file.exists() else None
    config_file = path.with_name("tokenizer_config.json")
    config = _read_json(config_file) if config_file.exists() else {}
    listed_file = path.with_name("added_tokens.json")
    listed = _read_json(listed_file) if listed_file.exists() else {}
    entries = [{"content": text, "id": token_id, "special": True} for text, token_id in listed.items()]
    for token_id, entry in _field(config_file, config, "added_tokens_decoder", dict, default={}).items():
        if not re.fullmatch("[0-9]{1,9}", token_id) or not isinstance(entry, dict):
            problem = f"{shown(token_id)} and what belongs to it are no token"
            raise CheckpointError(config_file, problem, "added_tokens_decoder")
        entries.append(entry | {"id": int(token_id)})
    added = {token.id: token for token in _added_tokens(path, entries)}
    prefix_space = config.get("add_prefix_space") is True
    return _from_spelled(path, _read_json(path), merges, tuple(added.values()), prefix_space)


def read_llmc_bin(path: Path) -> Vocabulary:
    """llm.c's `gpt2_tokenizer.bin`: 256 header words, then each token as one length byte and its bytes."""
    content = read_bounded(path)
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
    return check_vocabulary(Vocabulary(str(path), ids, added=added))


def read_tiktoken(path: Path) -> Vocabulary:
    """tiktoken's own format: lines of base64 token and rank. `<|endoftext|>` gets the lowest unused id."""
    ids: dict[bytes, int] = {}
    for number, line in enumerate(read_bounded(path).splitlines(), 1):
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
    return check_vocabulary(Vocabulary(str(path), ids, added=added))


def read_bounded(path: Path) -> bytes:
    """The whole of a regular file of at most MAX_FILE_BYTES."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would block for ever
            raise CheckpointError(path, "not a regular file")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise CheckpointError(path, error.strerror or "cannot be read") from None
    if len(content) > MAX_FILE_BYTES:
        raise CheckpointError(path, f"larger than {MAX_FILE_BYTES // 2**20} MiB")
    return content


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(read_bounded(path))
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else f"not JSON: {error}"
        raise CheckpointError(path, problem) from None
    if not isinstance(document, dict):
        raise CheckpointError(path, "not a JSON object")
    return document


def _field(path: Path, owner: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = owner.get(name)
    if value is None:
        value = default
    if not isinstance(value, kind):
        raise CheckpointError(path, "missing or of the wrong type", name)
    return value


def _normal_form(path: Path, normalizer: Any) -> NormalForm | None:
    """GPT-2's own text is not normalised; some of its relatives are trained on one of Unicode's normal forms."""
    if normalizer in (None, {"type": "Sequence", "normalizers": []}):
        return None
    for form in NORMAL_FORMS:
        if normalizer == {"type": form}:
            return form
    raise CheckpointError(path, f"{shown(normalizer)} is not supported", "normalizer")


def _added_tokens(path: Path, entries: Iterable[Any]) -> tuple[AddedToken, ...]:
    tokens = []
    for entry in entries:
        match entry:
            case {"id": int(token_id), "content": str(content)} if type(token_id) is int and _is_text(content):
                tokens.append(AddedToken(content, token_id, bool(entry.get("special", False))))
            case _:
                raise CheckpointError(path, f"{shown(entry)} has no usable id and content", "added_tokens")
    return tuple(tokens)


def _is_text(content: str) -> bool:
    """Neither empty nor with half a surrogate pair, which JSON can spell and UTF-8 cannot."""
    return bool(content) and not any("\ud800" <= character <= "\udfff" for character in content)


def _merge_lines(path: Path) -> list[str]:
    try:
        lines = read_bounded(path).decode().splitlines()
    except UnicodeDecodeError:
        raise CheckpointError(path, "not UTF-8") from None
    return [line for line in lines if line and not line.startswith("#version")]


def _merge_pairs(path: Path, merges: list[Any]) -> list[bytes]:
    """What each merge joins, in order. Newer files write pairs as lists, older ones as `first second`."""
    joined = []
    for number, merge in enumerate(merges):
        match merge.split(" ") if isinstance(merge, str) else merge:
            case [str(first), str(second)]:
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
) -> Vocabulary:
    """Checks a Hugging Face vocabulary against its merges, which decide the order in which pairs are joined."""
    for spelled, token_id in vocab.items():
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise CheckpointError(path, f"its id {shown(token_id)} is not an integer", f"token {shown(spelled)}")
    if END_OF_TEXT in vocab and END_OF_TEXT not in {token.content for token in added}:
        added = (*added, AddedToken(END_OF_TEXT, vocab[END_OF_TEXT], special=True))
    apart = {token.content for token in added}
    ids = {_unspell(path, spelled): token_id for spelled, token_id in vocab.items() if spelled not in apart}
    if merges is None:
        return check_vocabulary(Vocabulary(str(path), ids, None, added, prefix_space))
    order = tuple(dict.fromkeys(merges))
    marks = _check_merges(path, ids, order)
    added = (*added, *(AddedToken(mark.decode(), ids.pop(mark), special=True) for mark in marks))
    return check_vocabulary(Vocabulary(str(path), ids, order, added, prefix_space))


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
