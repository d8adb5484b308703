"""How many rows of an embedding are real tokens.

Embeddings are padded to a round number of rows for speed; the rows beyond the vocabulary are untrained, so
their logits stay near zero while those of real tokens may be near -70: they must never be drawn.
The tokenizer beside the weights knows where the vocabulary ends. With no tokenizer, 50304 rows are taken as
the padding of GPT-2's 50257 (what nanoGPT and llm.c do), and any other number as it stands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from ppserve.errors import CheckpointError
from ppserve.files import is_file, read_bytes, read_json

GPT2_VOCABULARY = 50257
GPT2_PADDED = 50304
LLMC_TOKENIZER_MAGIC = 20240328


_Id = Annotated[int, msgspec.Meta(ge=0)]


class _ListedToken(msgspec.Struct, frozen=True):
    id: _Id


class _Model(msgspec.Struct, frozen=True):
    vocab: dict[str, _Id]


class _TokenizerJson(msgspec.Struct, frozen=True):
    model: _Model
    added_tokens: list[_ListedToken] | None = None


class _AddedById(msgspec.Struct, frozen=True):
    added_tokens_decoder: dict[_Id, Any] | None = None


def real_vocabulary(directory: Path, num_rows: int, eos_id: int | None) -> int:
    """Real tokens among `num_rows`. Raises CheckpointError when a tokenizer file is damaged."""
    count = _json_vocabulary(directory) or _ranked_vocabulary(directory, eos_id) or _llmc_vocabulary(directory)
    if count is None:
        return GPT2_VOCABULARY if num_rows == GPT2_PADDED else num_rows
    return min(count, num_rows)


def _json_vocabulary(directory: Path) -> int | None:
    """One past the highest id in tokenizer.json, vocab.json and what lists added tokens beside them, together."""
    ids: list[int] = []
    path = directory / "tokenizer.json"
    if is_file(path):
        tokenizer = read_json(path, _TokenizerJson)
        ids += [*tokenizer.model.vocab.values(), *(token.id for token in tokenizer.added_tokens or ())]
    for name in ("vocab.json", "added_tokens.json"):
        if is_file(directory / name):
            ids += read_json(directory / name, dict[str, _Id]).values()
    path = directory / "tokenizer_config.json"
    if ids and is_file(path):
        ids += read_json(path, _AddedById).added_tokens_decoder or ()
    return max(ids) + 1 if ids else None


def _ranked_vocabulary(directory: Path, eos_id: int | None) -> int | None:
    """A *.tiktoken file lists ranks only; the end of text, where there is one, comes right after them."""
    paths = sorted(directory.glob("*.tiktoken"))
    if not paths:
        return None
    ranks = [line.split()[-1] for line in read_bytes(paths[0], 64 << 20).splitlines() if line.strip()]
    try:
        count = max(map(int, ranks)) + 1
    except ValueError as error:
        raise CheckpointError(paths[0], "is not a list of tokens and their ranks") from error
    return count + 1 if eos_id == count else count


def _llmc_vocabulary(directory: Path) -> int | None:
    path = directory / "gpt2_tokenizer.bin"
    if not is_file(path):
        return None
    header = read_bytes(path, 64 << 20)[:12]
    magic, _, count = (int.from_bytes(header[i : i + 4], "little") for i in (0, 4, 8))
    if magic != LLMC_TOKENIZER_MAGIC or count == 0:
        raise CheckpointError(path, "is not a tokenizer of llm.c", field="magic")
    return count
