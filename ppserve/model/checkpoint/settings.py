"""What every format says of a model: its sizes, its ends of text, and how many tokens are real.

The bounds are greater than the sizes of any model of these families. Tables of tensors that are made from sizes
within them cannot exhaust the memory before the tensors are compared with the file.

Embeddings are padded to a round number of rows. Rows beyond the vocabulary are untrained: their logits are near
zero, while those of real tokens may be near -70, so their ids must never be drawn. The tokenizer beside the
weights says where the vocabulary ends. Without a tokenizer, 50304 rows are taken for GPT-2's 50257, padded as in
nanoGPT and llm.c.
"""

from __future__ import annotations

from dataclasses import replace
from os.path import lexists
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ppserve.core.architecture import MAX_LAYERS, MAX_POSITIONS, Architecture
from ppserve.core.layers import LayerSpec
from ppserve.errors import CheckpointError
from ppserve.files import read_bytes, read_json

Layers = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
Width = Annotated[int, Meta(ge=1, le=1 << 17)]
Positions = Annotated[int, Meta(ge=1, le=MAX_POSITIONS)]
RotaryPositions = Annotated[int, Meta(ge=1)]
"""A number of positions for which no tensor has rows. The first `MAX_POSITIONS` are served."""
Rows = Annotated[int, Meta(ge=1, le=1 << 23)]
InnerWidth = Annotated[int, Meta(ge=1, le=1 << 20)]
Id = Annotated[int, Meta(ge=0)]

ACTIVATIONS = {
    **{name: name for name in ("gelu_new", "gelu", "quick_gelu", "relu", "silu", "tanh")},
    **dict.fromkeys(("gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_new"),
    "gelu_python": "gelu",
    "swish": "silu",
}
"""The names in config.json, with the keys of `model.stock.ACTIVATIONS`. Several names mean the same function."""

ActivationName = Annotated[str, Meta(pattern=rf"^({'|'.join(ACTIVATIONS)})\Z")]

EndOfText = int | Annotated[list[int], Meta(min_length=1)] | None
"""The id that ends a text, or several; None: no id does."""

END_OF_TEXT = 50256
"""The id of GPT-2's end of text."""
GPT2_VOCABULARY = 50257
GPT2_PADDED = 50304


class _ListedToken(msgspec.Struct, frozen=True):
    id: Id
    content: str = ""


class _Model(msgspec.Struct, frozen=True):
    vocab: dict[str, Id]


class _TokenizerJson(msgspec.Struct, frozen=True):
    model: _Model
    added_tokens: list[_ListedToken] | None = None


class _EndToken(msgspec.Struct, frozen=True):
    content: str = ""


class _BesideVocabulary(msgspec.Struct, frozen=True):
    added_tokens_decoder: dict[Id, Any] | None = None
    eos_token: str | _EndToken | None = None


def checked_architecture(path: Path, arch: Architecture, heads: str) -> Architecture:
    """Check an architecture, and return it without ends of text that are not in the vocabulary.

    Raises CheckpointError if the heads of keys and values do not divide those of queries, or if no backend
    computes one of the layers. heads: the key under which the file has the number of heads.
    """
    if arch.num_heads % arch.num_kv_heads:
        problem = f"{arch.num_kv_heads} heads of keys and values do not divide the {arch.num_heads} of queries"
        raise CheckpointError(path, problem, field=heads)
    for number, layer in enumerate(arch.layers):
        if reason := _not_served(layer, arch.layers[0]):
            raise CheckpointError(path, f"layer {number} {reason}")
    return replace(arch, eos_ids=tuple(end for end in arch.eos_ids if 0 <= end < arch.vocab_size))


def _not_served(layer: LayerSpec, first: LayerSpec) -> str | None:
    """Return what a layer has that no backend computes, as the end of a sentence; None if there is nothing."""
    if layer.mlp.experts is not None:
        return "has a mixture of experts; no model with experts is served"
    if layer.attention.has_sinks:
        return "has attention sinks; no model with sinks is served"
    mine, theirs = ((of.num_heads, of.num_kv_heads, of.head_size) for of in (layer.attention, first.attention))
    if mine != theirs:
        return "has other heads than layer 0; only models with the same heads in all layers are served"
    return None


def check_heads(path: Path, width: int, num_heads: int, field: str) -> None:
    """Raise CheckpointError if the heads do not divide the width. field: the key under which the file has their
    number."""
    if width % num_heads:
        raise CheckpointError(path, f"{num_heads} heads do not divide the width {width}", field=field)


def real_vocabulary(directory: Path, num_rows: int, eos_id: int | None) -> tuple[int, int | None]:
    """Return how many of `num_rows` tokens are real, and the tokenizer's end of text. Raises CheckpointError if a
    file of the tokenizer is damaged."""
    count, end = _json_vocabulary(directory)
    count = count or _ranked_vocabulary(directory, eos_id)
    if count is None:
        return (GPT2_VOCABULARY if num_rows == GPT2_PADDED else num_rows), end
    return min(count, num_rows), end


def _json_vocabulary(directory: Path) -> tuple[int | None, int | None]:
    """Return one more than the highest id in tokenizer.json, vocab.json and the lists of added tokens, and the id
    that ends a text; None for what is not there."""
    ids: dict[str, int] = {}
    if lexists(path := directory / "tokenizer.json"):
        tokenizer = read_json(path, _TokenizerJson)
        ids |= tokenizer.model.vocab | {token.content: token.id for token in tokenizer.added_tokens or ()}
    for name in ("vocab.json", "added_tokens.json"):
        if lexists(path := directory / name):
            ids |= read_json(path, dict[str, Id])
    if not ids:
        return None, None
    path = directory / "tokenizer_config.json"
    config = read_json(path, _BesideVocabulary) if lexists(path) else _BesideVocabulary()
    end = config.eos_token.content if isinstance(config.eos_token, _EndToken) else config.eos_token
    return max(*ids.values(), *(config.added_tokens_decoder or ()), 0) + 1, ids.get(end or "")


def _ranked_vocabulary(directory: Path, eos_id: int | None) -> int | None:
    """Return how many ids tokenizer.tiktoken has. It lists ranks, and an end of text comes right after these."""
    path = directory / "tokenizer.tiktoken"
    if not lexists(path):
        return None
    ranks = [line.split()[-1] for line in read_bytes(path, 64 << 20).splitlines() if line.strip()]
    try:
        count = max(map(int, ranks)) + 1
    except ValueError as error:
        raise CheckpointError(path, "is not a list of tokens and their ranks") from error
    return count + 1 if eos_id == count else count
