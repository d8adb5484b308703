"""Writes any vocabulary as Hugging Face's `tokenizer.json`, for programs that tokenize by themselves."""

from __future__ import annotations

from typing import Any

import msgspec

from ppserve.tokenizer.vocabulary import Vocabulary, spelling

_CHARACTER_OF = {byte: character for character, byte in spelling().items()}


def tokenizer_json(vocabulary: Vocabulary) -> bytes:
    """A BPE model with a ByteLevel pre-tokenizer.

    It makes the same ids of the same text as `Tokenizer`, except that it finds special tokens in text as well, as
    all of Hugging Face's tokenizers do.
    """
    spelled = {_spelled(token): token_id for token, token_id in vocabulary.ids.items()}
    # Added tokens too: those that are not here get other numbers from Hugging Face than the file says.
    spelled |= {token.content: token.id for token in vocabulary.added}
    splitter = {"type": "ByteLevel", "add_prefix_space": vocabulary.prefix_space, "trim_offsets": True}
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token.id,
                "content": token.content,
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
                "special": token.special,
            }
            for token in sorted(vocabulary.added, key=lambda token: token.id)
        ],
        "normalizer": None if vocabulary.normal_form is None else {"type": vocabulary.normal_form},
        "pre_tokenizer": {**splitter, "use_regex": True},
        "post_processor": {**splitter, "use_regex": True},
        "decoder": {**splitter, "use_regex": True},
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": dict(sorted(spelled.items(), key=lambda pair: pair[1])),
            "merges": [[_spelled(left), _spelled(right)] for left, right in _merges(vocabulary.ranks())],
        },
    }
    return msgspec.json.encode(document)


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every pair of tokens that together are a token, by its rank: tiktoken joins neighbours whenever what they
    make is a token."""
    pairs = []
    for token in sorted(ranks, key=ranks.__getitem__):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                pairs.append((left, right))
    return pairs


def _spelled(token: bytes) -> str:
    return "".join([_CHARACTER_OF[byte] for byte in token])
