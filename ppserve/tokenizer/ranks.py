"""Vocabularies whose ids are merge ranks, encoded by tiktoken with GPT-2's splitting into words.

These are tiktoken's own files, llm.c's, and GPT-2's. The loaders of tiktoken cache by path and would miss an edit.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

from ppserve.errors import CheckpointError
from ppserve.files import read_bytes, shown
from ppserve.tokenizer.hugging_face import ranks_as_json
from ppserve.tokenizer.tokenizer import END_OF_TEXT, Tokenizer, by_id

MAX_FILE_BYTES = 64 << 20
MAX_TOKENS = 1 << 20
BIN_MAGIC = 20240328
BIN_HEADER_BYTES = 256 * 4


def read_tiktoken(path: Path) -> Tokenizer:
    """tiktoken's own format: lines of base64 token and rank. `<|endoftext|>` gets the lowest unused id.

    Raises CheckpointError.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path, MAX_FILE_BYTES).splitlines(), 1):
        if not line:
            continue
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
            token_id = int(rank)
        except (ValueError, binascii.Error):
            raise CheckpointError(path, "not a base64 token and its rank", f"line {number}") from None
        if token in ranks or not token:
            raise CheckpointError(path, "this token is empty or occurs twice", f"line {number}")
        ranks[token] = token_id
    taken = set(ranks.values())
    free = next(token_id for token_id in range(len(ranks) + 1) if token_id not in taken)
    return _tokenizer(str(path), ranks, free)


def read_llmc_bin(path: Path) -> Tokenizer:
    """llm.c's `gpt2_tokenizer.bin`: 256 header words, then each token as one length byte and its bytes.

    Raises CheckpointError.
    """
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
    ranks = {token: token_id for token_id, token in enumerate(tokens) if token_id != end_of_text}
    if len(ranks) != count - (end_of_text < count):
        raise CheckpointError(path, "a token occurs twice")
    return _tokenizer(str(path), ranks, end_of_text if end_of_text < count else None)


def gpt2_tokenizer(get_encoding: Callable[[str], tiktoken.Encoding]) -> Tokenizer:
    """GPT-2's own, from tiktoken's cache or downloaded. Raises what `get_encoding` raises."""
    encoding = get_encoding("gpt2")
    ranks = {token: encoding.encode_single_token(token) for token in encoding.token_byte_values()}
    ranks.pop(END_OF_TEXT.encode(), None)
    return _tokenizer("tiktoken's gpt2", ranks, encoding.eot_token)


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


def _tokenizer(source: str, ranks: dict[bytes, int], end_of_text: int | None) -> Tokenizer:
    """Raises CheckpointError unless the ids are an order of merges."""
    token_bytes = by_id(source, ranks)
    if not 0 <= min(token_bytes) <= max(token_bytes) < MAX_TOKENS:
        raise CheckpointError(source, f"token ids are not within 0 to {MAX_TOKENS - 1}")
    _check_merge_order(source, ranks)
    if end_of_text is not None:
        token_bytes[end_of_text] = END_OF_TEXT.encode()
    special = () if end_of_text is None else (end_of_text,)
    encoding = tiktoken.Encoding(source, pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})
    to_json = partial(ranks_as_json, ranks, end_of_text)
    return Tokenizer(source, encoding.encode_ordinary, to_json, token_bytes, special)


def _check_merge_order(source: str, ranks: dict[bytes, int]) -> None:
    """Raises CheckpointError unless every token can be merged from two tokens with lower ranks."""

    def rank_of(part: bytes) -> int:
        return -1 if len(part) == 1 else ranks.get(part, MAX_TOKENS)

    for token, rank in ranks.items():
        cuts = range(1, len(token))
        if cuts and not any(max(rank_of(token[:cut]), rank_of(token[cut:])) < rank for cut in cuts):
            problem = f"ids are not in merge order (token {rank}, {shown(token)}, is not made of earlier ones)"
            raise CheckpointError(source, problem)
