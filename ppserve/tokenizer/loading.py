"""Finds a model's tokenizer: a file beside the weights, else GPT-2's own from tiktoken."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import tiktoken

from ppserve.errors import CheckpointError
from ppserve.files import TINY, within
from ppserve.gguf_file import is_gguf
from ppserve.tokenizer.formats import (
    gpt2_tokenizer,
    read_gguf,
    read_llama3,
    read_llmc_bin,
    read_tiktoken,
    read_tokenizer_json,
    read_vocab_json,
)
from ppserve.tokenizer.tokenizer import Tokenizer, no_tokenizer

logger = logging.getLogger(__name__)

GPT2_VOCAB_SIZE = 50257
DOWNLOAD_TIMEOUT_S = 20.0
"""A download by tiktoken may take so long. tiktoken itself sets no limit."""

READERS: dict[str, Callable[[Path], Tokenizer]] = {
    "tokenizer.json": read_tokenizer_json,
    "vocab.json": read_vocab_json,
    "gpt2_tokenizer.bin": read_llmc_bin,
    "tokenizer.tiktoken": read_tiktoken,
    "tokenizer.model": read_llama3,
}
"""Functions that read a tokenizer, by file name. The first of these files that is there is read."""


def load_tokenizer(
    path: str,
    vocab_size: int | None = None,
    get_encoding: Callable[[str], tiktoken.Encoding] = tiktoken.get_encoding,
) -> Tokenizer:
    """Return the tokenizer of the model at `path` (a directory, a file in it, or `tiny`).

    It is read from the first file of `READERS` beside the weights. If there is none, it is tiktoken's GPT-2
    encoding, provided that this is cached or can be downloaded and that `vocab_size`, if given, is GPT-2's. Else
    the tokenizer is empty, and the log says why. Raises CheckpointError for an unusable file.
    """
    given = TINY if path == "tiny" else Path(path).expanduser()
    directory = given.parent if given.is_file() else given
    tokenizer = read_gguf(given) if is_gguf(given) else _read_directory(directory)
    if tokenizer is not None:
        # The model may lack tokens that were added to the vocabulary. A request whose text has one is refused.
        last = tokenizer.highest_encoded_id()
        if vocab_size is not None and last >= vocab_size:
            raise CheckpointError(tokenizer.source, f"token id {last} is beyond the model's {vocab_size} tokens")
        return tokenizer
    problem = f"{directory}: none of {', '.join(READERS)}"
    try:
        if vocab_size is not None and not GPT2_VOCAB_SIZE <= vocab_size < GPT2_VOCAB_SIZE + 256:
            raise ValueError(f"{vocab_size} tokens are not GPT-2's")
        return within(DOWNLOAD_TIMEOUT_S, lambda: gpt2_tokenizer(get_encoding))
    except Exception as error:  # no network, no cache, a wrong hash: then no tokenizer
        logger.warning(
            "no tokenizer, so requests need token ids: %s, and GPT-2's cannot be used (%s)", problem, error
        )
        return no_tokenizer()


def _read_directory(directory: Path) -> Tokenizer | None:
    for name, read in READERS.items():
        if os.path.lexists(directory / name):
            return read(directory / name)
    return None
