"""Finds the vocabulary of a model: a file beside the weights, else GPT-2's own from tiktoken."""

from __future__ import annotations

import importlib.resources
import logging
import os
from collections.abc import Callable
from pathlib import Path

import tiktoken

from ppserve.errors import CheckpointError
from ppserve.files import within
from ppserve.tokenizer.files import READERS, read_tiktoken
from ppserve.tokenizer.tokenizer import Tokenizer
from ppserve.tokenizer.vocabulary import END_OF_TEXT, AddedToken, Vocabulary

logger = logging.getLogger(__name__)

GPT2_VOCAB_SIZE = 50257
DOWNLOAD_TIMEOUT_S = 20.0
"""tiktoken's own download has no limit."""


def load_tokenizer(
    path: str,
    vocab_size: int | None = None,
    get_encoding: Callable[[str], tiktoken.Encoding] = tiktoken.get_encoding,
) -> Tokenizer | None:
    """The tokenizer of the model at `path` (a directory, a file in it, or `tiny`); None when there is none.

    It is read from the first of these files beside the weights: tokenizer.json, vocab.json (with merges.txt),
    gpt2_tokenizer.bin, *.tiktoken. Without any, tiktoken's GPT-2 encoding is used, if it is cached or can be
    downloaded and the model's `vocab_size`, where given, is GPT-2's. If there is no tokenizer, the log says why.
    Raises CheckpointError for a file that exists and cannot be used.
    """
    directory = model_directory(path)
    vocabulary = find_vocabulary(directory)
    if vocabulary is not None:
        # Special tokens are never found in text: those that the model lacks harm nobody.
        plain_added = (token.id for token in vocabulary.added if not token.special)
        highest = max(*vocabulary.ids.values(), *plain_added)
        if vocab_size is not None and highest >= vocab_size:
            problem = f"token id {highest} is beyond the model's {vocab_size} tokens"
            raise CheckpointError(vocabulary.source, problem)
        return Tokenizer(vocabulary)
    problem = f"{directory}: no tokenizer.json, vocab.json, gpt2_tokenizer.bin or *.tiktoken"
    if vocab_size is not None and not GPT2_VOCAB_SIZE <= vocab_size < GPT2_VOCAB_SIZE + 256:
        logger.warning("no tokenizer, token ids only: %s, and %d tokens are not GPT-2's", problem, vocab_size)
        return None
    try:
        return Tokenizer(within(DOWNLOAD_TIMEOUT_S, lambda: _gpt2_vocabulary(get_encoding)))
    except Exception as error:  # no network, no cache, a wrong hash: in each case there is no tokenizer
        logger.warning("no tokenizer, token ids only: %s, and GPT-2's own cannot be had (%s)", problem, error)
        return None


def model_directory(path: str) -> Path:
    """The directory of the weights and of the files beside them."""
    if path == "tiny":
        return Path(str(importlib.resources.files("ppserve"))) / "assets" / "tiny"
    given = Path(path).expanduser()
    return given.parent if given.is_file() else given


def find_vocabulary(directory: Path) -> Vocabulary | None:
    """The first vocabulary in the directory, in the order of READERS; then any other single *.tiktoken."""
    for name, read in READERS:
        if os.path.lexists(directory / name):
            return read(directory / name)
    others = sorted(directory.glob("*.tiktoken"))
    if len(others) > 1:
        names = " and ".join(file.name for file in others)
        raise CheckpointError(directory, f"{names}: rename the one to use to tokenizer.tiktoken")
    return read_tiktoken(others[0]) if others else None


def _gpt2_vocabulary(get_encoding: Callable[[str], tiktoken.Encoding]) -> Vocabulary:
    encoding = get_encoding("gpt2")
    end_of_text = encoding.eot_token
    tokens = {token: encoding.encode_single_token(token) for token in encoding.token_byte_values()}
    ids = {token: token_id for token, token_id in tokens.items() if token_id != end_of_text}
    return Vocabulary("tiktoken's gpt2", ids, added=(AddedToken(END_OF_TEXT, end_of_text, special=True),))
