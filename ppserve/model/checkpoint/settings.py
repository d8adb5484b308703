"""What every format says of a model: its sizes, the end of a text, and how many tokens are real.

The bounds leave room above every GPT-2 in existence. Sizes computed from them cannot exhaust the memory before the
tensors are compared with the file.

Embeddings are padded to a round number of rows. Those beyond the vocabulary are untrained, with logits near zero
while those of real tokens may be near -70: they must never be drawn.
The tokenizer beside the weights knows where the vocabulary ends.
Without one, 50304 rows are GPT-2's 50257, padded as nanoGPT and llm.c do.
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
"""A number of positions that no tensor has a row for; the first `MAX_POSITIONS` are served."""
Rows = Annotated[int, Meta(ge=1, le=1 << 23)]
InnerWidth = Annotated[int, Meta(ge=1, le=1 << 20)]
Id = Annotated[int, Meta(ge=0)]

ACTIVATIONS = {
    **{name: name for name in ("gelu_new", "gelu", "quick_gelu", "relu", "silu", "tanh")},
    **dict.fromkeys(("gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_new"),
    "gelu_python": "gelu",
    "swish": "silu",
}
"""Names in config.json to the key in `model.stock.ACTIVATIONS`; several names are one function."""

ActivationName = Annotated[str, Meta(pattern=rf"^({'|'.join(ACTIVATIONS)})\Z")]

EndOfText = int | Annotated[list[int], Meta(min_length=1)] | None
"""The id that ends a text, or several; null for none."""

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


def settled(path: Path, arch: Architecture, heads: str) -> Architecture:
    """Return the architecture without ends of text beyond the vocabulary. heads: the file's name for their number.

    Raises CheckpointError unless the heads of keys and values divide those of queries, and for layers that no
    backend computes.
    """
    if arch.num_heads % arch.num_kv_heads:
        problem = f"{arch.num_kv_heads} heads of keys and values do not divide the {arch.num_heads} of queries"
        raise CheckpointError(path, problem, field=heads)
    for number, layer in enumerate(arch.layers):
        if reason := _not_served(layer, arch.layers[0]):
            raise CheckpointError(path, f"layer {number} {reason}")
    return replace(arch, eos_ids=tuple(end for end in arch.eos_ids if 0 <= end < arch.vocab_size))


def _not_served(layer: LayerSpec, first: LayerSpec) -> str | None:
    """What no backend computes of a layer, in words; None if there is nothing."""
    if layer.mlp.experts is not None:
        return "has a mixture of experts; no model with experts is served"
    if layer.attention.has_sinks:
        return "has attention sinks; no model with sinks is served"
    mine, theirs = ((of.num_heads, of.num_kv_heads, of.head_size) for of in (layer.attention, first.attention))
    if mine != theirs:
        return "has other heads than layer 0; only models with the same heads in all layers are served"
    return None


def check_heads(path: Path, width: int, num_heads: int, field: str) -> None:
    """Raises CheckpointError unless the heads divide the width. field: the file's name for their number."""
    if width % num_heads:
        raise CheckpointError(path, f"{num_heads} heads do not divide the width {width}", field=field)


def real_vocabulary(directory: Path, num_rows: int, eos_id: int | None) -> tuple[int, int | None]:
    """Return the number of real tokens among `num_rows`, and the tokenizer's end of text. Raises CheckpointError
    when its file is damaged."""
    count, end = _json_vocabulary(directory)
    count = count or _ranked_vocabulary(directory, eos_id)
    if count is None:
        return (GPT2_VOCABULARY if num_rows == GPT2_PADDED else num_rows), end
    return min(count, num_rows), end


def _json_vocabulary(directory: Path) -> tuple[int | None, int | None]:
    """One past the highest id in tokenizer.json, vocab.json and what lists added tokens; and the end of a text."""
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
    """tokenizer.tiktoken lists ranks only; an end of text comes right after them."""
    path = directory / "tokenizer.tiktoken"
    if not lexists(path):
        return None
    ranks = [line.split()[-1] for line in read_bytes(path, 64 << 20).splitlines() if line.strip()]
    try:
        count = max(map(int, ranks)) + 1
    except ValueError as error:
        raise CheckpointError(path, "is not a list of tokens and their ranks") from error
    return count + 1 if eos_id == count else count
